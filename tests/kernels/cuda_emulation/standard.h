// What the emulation takes from the standard library, which the compiler reads once for all objects (build.py).
#ifndef ANTKV_EMULATION_STANDARD
#define ANTKV_EMULATION_STANDARD

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#endif

// Runs of query heads whose number the compiler knows.
#pragma once

#include <algorithm>
#include <type_traits>

namespace antkv {

// Call `kernel(std::integral_constant<int, n>, first)` for runs of n heads that together are `num_heads`.
template <typename Kernel>
void for_heads(int num_heads, Kernel kernel) {
    for (int h = 0; h < num_heads;) {
        switch (std::min(num_heads - h, 8)) {
            case 8: kernel(std::integral_constant<int, 8>{}, h); h += 8; break;
            case 7: kernel(std::integral_constant<int, 7>{}, h); h += 7; break;
            case 6: kernel(std::integral_constant<int, 6>{}, h); h += 6; break;
            case 5: kernel(std::integral_constant<int, 5>{}, h); h += 5; break;
            case 4: kernel(std::integral_constant<int, 4>{}, h); h += 4; break;
            case 3: kernel(std::integral_constant<int, 3>{}, h); h += 3; break;
            case 2: kernel(std::integral_constant<int, 2>{}, h); h += 2; break;
            default: kernel(std::integral_constant<int, 1>{}, h); h += 1;
        }
    }
}

// Calls kernel(std::integral_constant<int, n>, first, count) for runs of `count` heads, at most n, which together are
// `num_heads`.
template <int kMost, typename Kernel>
void for_tile_heads(int num_heads, Kernel kernel) {
    for (int h = 0; h < num_heads; h += kMost) {
        const int count = std::min(kMost, num_heads - h);
        if (count == 1) kernel(std::integral_constant<int, 1>{}, h, count);
        else if (count == 2) kernel(std::integral_constant<int, 2>{}, h, count);
        else if (count <= 4) kernel(std::integral_constant<int, 4>{}, h, count);
        else if (count <= 8) kernel(std::integral_constant<int, 8>{}, h, count);
        else if constexpr (kMost == 16) kernel(std::integral_constant<int, 16>{}, h, count);
    }
}

}  // namespace antkv

// Where kernels order their threads, and what becomes of one such place: left out, or put wrong. A kernel that is right
// without one of them has it for nothing; one that is wrong without it, and passes all tests, is not tested.
#pragma once

#define ANTKV_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emulation {

enum class Change { kNone, kLeftOut, kWrong };

struct Site {
    std::string name;
    bool can_be_wrong;
    Change change;
};

inline std::map<std::pair<const char*, int>, Site> sites;  // that were come by so far
inline std::pair<std::string, Change> changed_site;

inline Change change_at(const char* what, const char* file, int line, bool can_be_wrong = false) {
    Site& site = sites[{file, line}];
    if (site.name.empty()) {
        const char* folder = std::strrchr(file, '/');
        site.name = std::string(folder ? folder + 1 : file) + ":" + std::to_string(line) + " " + what;
        site.can_be_wrong = can_be_wrong;
        site.change = site.name == changed_site.first ? changed_site.second : Change::kNone;
    }
    return site.change;
}
inline bool is_left_out(const char* what, const char* file, int line) {
    return change_at(what, file, line) == Change::kLeftOut;
}

}  // namespace emulation

// Change one place, by its name, and no other; none if there is no such place.
extern "C" inline __attribute__((used)) void emulation_change(const char* site, bool puts_wrong) {
    emulation::changed_site = {site, puts_wrong ? emulation::Change::kWrong : emulation::Change::kLeftOut};
    emulation::sites.clear();
}
// A line for each place that was come by since the last change: its name, and a `*` if it can be put wrong.
extern "C" inline __attribute__((used)) const char* emulation_sites() {
    static std::string text;
    text.clear();
    for (const auto& [where, site] : emulation::sites) text += site.name + (site.can_be_wrong ? "*\n" : "\n");
    return text.c_str();
}

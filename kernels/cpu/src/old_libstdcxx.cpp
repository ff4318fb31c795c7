// libstdc++ has this function since GCC 11. This copy, which exports.map keeps private, lets a library compiled by a
// newer GCC load with an older libstdc++.
#include <new>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif

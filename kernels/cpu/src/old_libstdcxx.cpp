// libstdc++ has this function since GCC 11. With a copy in the library (exports.map keeps it inside), what a newer GCC
// compiled loads beside an older libstdc++.
#include <new>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
#endif

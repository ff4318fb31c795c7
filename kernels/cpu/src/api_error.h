// How functions of the C interface fail: a status, and a sentence that the calling thread can ask for.
#ifndef FASTATTENTION_API_ERROR_H
#define FASTATTENTION_API_ERROR_H

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <system_error>

#include "fastattention_cpu.h"

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

namespace fastattention {

// Keeps the sentence and returns the status.
__attribute__((format(printf, 2, 3))) int32_t fail(fa_status status, const char* format, ...);
const char* last_error();

// Runs body, which returns a status, and turns every exception into one.
template <class F>
int32_t guarded(F body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(FA_OUT_OF_MEMORY, "out of memory for scratch buffers.");
  } catch (const std::system_error& error) {
    const bool refused = error.code() == std::errc::invalid_argument;
    return fail(refused ? FA_BAD_ARGUMENT : FA_OUT_OF_MEMORY, "could not start the thread pool: %s.", error.what());
  } catch (const std::logic_error& error) {
    return fail(FA_BAD_ARGUMENT, "%s.", error.what());
  } catch (const std::exception& error) {
    return fail(FA_BAD_ARGUMENT, "unexpected error: %s.", error.what());
  }
}

inline bool is_wide(int32_t dtype) { return dtype == FA_F32 || dtype == FA_F16 || dtype == FA_BF16; }

#define FA_REQUIRE_POINTER(object, field) \
  if ((object).field == nullptr) return fail(FA_BAD_ARGUMENT, #field " must not be a null pointer.")

}  // namespace fastattention

#endif

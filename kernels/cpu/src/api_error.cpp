#include "api_error.h"

#include <cstdarg>
#include <cstdio>

namespace fastattention {
namespace {
thread_local char text[512] = "";
}

int32_t fail(fa_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  return status;
}

const char* last_error() { return text; }

}  // namespace fastattention

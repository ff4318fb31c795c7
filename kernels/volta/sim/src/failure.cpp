#include "failure.h"

#include <cstdarg>
#include <cstdio>

namespace volta_sim {

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  throw Failure(text);
}

}  // namespace volta_sim

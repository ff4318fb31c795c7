// The error of all parts of the simulator.
#ifndef VOLTA_SIM_FAILURE_H
#define VOLTA_SIM_FAILURE_H

#include <stdexcept>

namespace volta_sim {

// Its text is one sentence for the user.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace volta_sim

#endif

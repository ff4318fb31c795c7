// The C interface: checks arguments and catches every exception.
#include <cstring>
#include <exception>
#include <memory>

#include "cta.h"
#include "failure.h"
#include "opcode.h"
#include "parse.h"
#include "sm.h"
#include "volta_sim.h"

#define FA_EXPORT extern "C" __attribute__((visibility("default")))

struct fa_sim {
  volta_sim::Program program;
  volta_sim::Machine machine;
  std::vector<std::unique_ptr<volta_sim::Trace>> traces;
  uint64_t limit = 400'000'000;
  std::string error;

  const volta_sim::Trace& trace(int32_t number) const {
    if (number < 0 || static_cast<size_t>(number) >= traces.size()) volta_sim::fail("there is no trace %d.", number);
    return *traces[static_cast<size_t>(number)];
  }
  const volta_sim::Instruction& instruction(int32_t index) const {
    if (index < 0 || static_cast<size_t>(index) >= program.size())
      volta_sim::fail("there is no instruction %d.", index);
    return program[static_cast<size_t>(index)];
  }
};

namespace {

using volta_sim::Cost;
using volta_sim::fail;

template <typename Function>
int32_t guarded(fa_sim* sim, Function function) {
  try {
    sim->error.clear();
    function();
    return 0;
  } catch (const std::bad_alloc&) {
    sim->error = "the simulator is out of memory.";
  } catch (const std::exception& exception) {
    sim->error = exception.what();
  }
  return -1;
}

int32_t access_kind(const volta_sim::Instruction& instruction) {
  if (instruction.opcode == nullptr) return 0;
  switch (instruction.opcode->cost) {
    case Cost::kSharedLoad:
      return 1;
    case Cost::kSharedStore:
    case Cost::kSharedAtomic:
      return 2;
    case Cost::kShuffle:
      return 3;
    case Cost::kGlobalLoad:
      return 4;
    case Cost::kGlobalStore:
      return 5;
    default:
      return 0;
  }
}

void check_timing(const fa_sim_timing& timing) {
  const int32_t positive[] = {timing.memory_queue,       timing.special_function_occupancy, timing.conversion_occupancy,
                              timing.memory_occupancy,   timing.tensor_occupancy,           timing.l1_kib,
                              timing.l1_bytes_per_cycle, timing.store_bytes_per_cycle};
  const int32_t latencies[] = {
      timing.shared_load_latency, timing.shuffle_latency,       timing.special_function_latency, timing.l1_latency,
      timing.l2_latency,          timing.constant_load_latency, timing.special_register_latency, timing.barrier_latency,
      timing.branch_latency};
  for (const int32_t value : positive) {
    if (value < 1) fail("queues, occupancies, sizes and rates of the timing must be at least 1, not %d.", value);
  }
  for (const int32_t value : latencies) {
    if (value < 0) fail("latencies of the timing must not be negative, but one is %d.", value);
  }
  if (!(timing.l2_bytes_per_cycle > 0)) fail("l2_bytes_per_cycle must be more than 0.");
}

}  // namespace

FA_EXPORT fa_sim* fa_sim_create(void) { return new (std::nothrow) fa_sim; }

FA_EXPORT void fa_sim_destroy(fa_sim* sim) { delete sim; }

FA_EXPORT const char* fa_sim_error(const fa_sim* sim) { return sim->error.c_str(); }

FA_EXPORT int32_t fa_sim_load(fa_sim* sim, const char* listing, const void* code, uint64_t code_bytes) {
  return guarded(sim, [&] {
    sim->traces.clear();
    sim->program = volta_sim::parse(listing, static_cast<const uint8_t*>(code), code_bytes);
  });
}

FA_EXPORT int32_t fa_sim_num_instructions(const fa_sim* sim) { return static_cast<int32_t>(sim->program.size()); }

FA_EXPORT const char* fa_sim_instruction_text(const fa_sim* sim, int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= sim->program.size()) return nullptr;
  return sim->program[static_cast<size_t>(index)].text.c_str();
}

FA_EXPORT int32_t fa_sim_instruction(fa_sim* sim, int32_t index, fa_sim_instruction_info* info) {
  return guarded(sim, [&] {
    const volta_sim::Instruction& instruction = sim->instruction(index);
    const auto pipe = instruction.opcode != nullptr ? instruction.opcode->pipe : volta_sim::Pipe::kAlu;
    *info = {static_cast<int32_t>(pipe), instruction.occupancy, access_kind(instruction), instruction.width};
  });
}

FA_EXPORT const char* fa_sim_pipe_name(int32_t pipe) { return volta_sim::pipe_name(pipe); }

FA_EXPORT int32_t fa_sim_set_constants(fa_sim* sim, int32_t bank, const void* data, uint64_t bytes) {
  return guarded(sim, [&] { sim->machine.constants.set(bank, data, bytes); });
}

FA_EXPORT int32_t fa_sim_map(fa_sim* sim, uint64_t address, uint64_t bytes, void* host, int32_t writable) {
  return guarded(sim, [&] { sim->machine.global.map(address, bytes, host, writable != 0); });
}

FA_EXPORT int32_t fa_sim_unmap_all(fa_sim* sim) {
  return guarded(sim, [&] { sim->machine.global.unmap_all(); });
}

FA_EXPORT int32_t fa_sim_set_instruction_limit(fa_sim* sim, uint64_t limit) {
  return guarded(sim, [&] { sim->limit = limit; });
}

FA_EXPORT int32_t fa_sim_set_launch(fa_sim* sim, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes,
                                    uint32_t local_bytes) {
  return guarded(sim, [&] {
    constexpr uint64_t kMaxThreads = 1024;
    const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
    const bool too_long = block[0] > kMaxThreads || block[1] > kMaxThreads || block[2] > kMaxThreads;
    if (threads == 0 || too_long || threads > kMaxThreads) {
      fail("a block must have 1 to 1024 threads, not %u x %u x %u.", block[0], block[1], block[2]);
    }
    if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) fail("every dimension of a grid must be at least 1.");
    std::copy(grid, grid + 3, sim->machine.launch.grid);
    std::copy(block, block + 3, sim->machine.launch.block);
    sim->machine.launch.shared_bytes = shared_bytes;
    sim->machine.launch.local_bytes = local_bytes;
  });
}

FA_EXPORT int32_t fa_sim_run(fa_sim* sim, uint32_t x, uint32_t y, uint32_t z, int32_t* trace) {
  return guarded(sim, [&] {
    const uint32_t* grid = sim->machine.launch.grid;
    if (x >= grid[0] || y >= grid[1] || z >= grid[2]) fail("CTA (%u, %u, %u) is outside of the grid.", x, y, z);
    auto kept = trace != nullptr ? std::make_unique<volta_sim::Trace>() : nullptr;
    volta_sim::run_cta(sim->program, sim->machine, x, y, z, sim->limit, kept.get());
    if (trace == nullptr) return;
    *trace = static_cast<int32_t>(sim->traces.size());
    sim->traces.push_back(std::move(kept));
  });
}

FA_EXPORT int32_t fa_sim_drop_traces(fa_sim* sim) {
  return guarded(sim, [&] { sim->traces.clear(); });
}

FA_EXPORT int32_t fa_sim_executions(fa_sim* sim, int32_t trace, uint64_t* counts) {
  return guarded(sim, [&] {
    for (const auto& warp : sim->trace(trace).warps) {
      for (const volta_sim::Record& record : warp) ++counts[record.instruction];
    }
  });
}

FA_EXPORT int32_t fa_sim_transactions(fa_sim* sim, int32_t trace, uint64_t* counts) {
  return guarded(sim, [&] {
    const volta_sim::Trace& from = sim->trace(trace);
    for (const auto& warp : from.warps) {
      for (const volta_sim::Record& record : warp) {
        const int32_t kind = access_kind(sim->program[record.instruction]);
        if (kind == 0 || kind == 3 || record.lanes == 0) continue;
        const volta_sim::Access& access = from.accesses.at(record.detail);
        counts[record.instruction] += kind >= 4 ? access.num_sectors : access.wavefronts;
      }
    }
  });
}

FA_EXPORT void fa_sim_default_timing(fa_sim_timing* timing) {
  *timing = {};
  timing->shared_load_latency = 19;
  timing->shuffle_latency = 20;
  timing->special_function_latency = 14;
  timing->l1_latency = 28;
  timing->l2_latency = 192;
  timing->constant_load_latency = 30;
  timing->special_register_latency = 20;
  timing->barrier_latency = 10;
  timing->branch_latency = 7;
  timing->memory_queue = 6;
  timing->special_function_occupancy = 8;
  timing->conversion_occupancy = 8;
  timing->memory_occupancy = 2;
  timing->tensor_occupancy = 2;
  timing->l1_kib = 32;
  timing->l1_bytes_per_cycle = 64;
  timing->store_bytes_per_cycle = 64;
  timing->l2_bytes_per_cycle = 19.5;
}

FA_EXPORT int32_t fa_sim_time_sm(fa_sim* sim, const int32_t* traces, int32_t num_traces, int32_t resident,
                                 const fa_sim_timing* timing, fa_sim_time* time, uint64_t* waits) {
  return guarded(sim, [&] {
    check_timing(*timing);
    if (num_traces < 1) fail("there is no trace to time.");
    if (resident < 1 || resident > num_traces) fail("%d of %d CTAs cannot be resident.", resident, num_traces);
    std::vector<const volta_sim::Trace*> ctas;
    for (int32_t i = 0; i < num_traces; ++i) {
      ctas.push_back(&sim->trace(traces[i]));
      if (ctas.back()->warps.size() != ctas.front()->warps.size()) fail("all CTAs must have the same number of warps.");
    }
    *time = volta_sim::time_sm(sim->program, ctas, resident, *timing, waits);
  });
}

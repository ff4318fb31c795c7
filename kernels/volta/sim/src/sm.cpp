#include "sm.h"

#include <algorithm>
#include <limits>

#include "failure.h"
#include "memory_path.h"
#include "resident.h"

namespace volta_sim {
namespace {

constexpr int kLaunchCycles = 30;  // from the end of a CTA to the first instruction of the next
constexpr int64_t kLongest = 2'000'000'000;
constexpr uint32_t kNoDetail = ~0u;  // the detail of a barrier at which no lane arrived

enum class Obstacle { kNone, kNotReady, kScoreboard, kPipe, kQueue };

class Sm {
 public:
  Sm(const Program& program, const std::vector<const Trace*>& ctas, int resident, const fa_sim_timing& timing,
     uint64_t* waits)
      : program_(program), ctas_(ctas), timing_(timing), waits_(waits), memory_(timing_, time_) {
    warps_per_cta_ = static_cast<int>(ctas.front()->warps.size());
    slots_.resize(static_cast<size_t>(resident));
    warps_.resize(static_cast<size_t>(resident * warps_per_cta_));
    for (int i = 0; i < static_cast<int>(warps_.size()); ++i) sub_cores_[i % kSubCores].warps.push_back(i);
  }

  fa_sim_time run() {
    for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot) launch(slot, 0);
    while (finished_ < ctas_.size()) {
      count_down();
      bool issued = false;
      for (SubCore& core : sub_cores_) issued |= cycle(core);
      ++now_;
      if (!issued) now_ = std::max(now_, next_event());
      if (now_ > kLongest) fail("the CTAs take more than %lld cycles.", static_cast<long long>(kLongest));
    }
    time_.cycles = static_cast<double>(now_);
    return time_;
  }

 private:
  const Instruction& instruction_of(const Record& record) const { return program_[record.instruction]; }
  ResidentWarp& warp(int slot, int i) { return warps_[static_cast<size_t>(slot * warps_per_cta_ + i)]; }

  void launch(int slot, Cycles now) {
    if (launched_ >= ctas_.size()) return;
    const Trace* trace = ctas_[launched_];
    const bool is_first = launched_ < slots_.size();
    slots_[static_cast<size_t>(slot)] = {warps_per_cta_, {}};
    for (int i = 0; i < warps_per_cta_; ++i) {
      ResidentWarp fresh;
      fresh.trace = trace;
      fresh.records = &trace->warps[static_cast<size_t>(i)];
      fresh.ready = now + (is_first ? 0 : kLaunchCycles);
      fresh.slot = slot;
      fresh.age = static_cast<int>(launched_);
      fresh.generation = launched_;
      fresh.done = false;
      warp(slot, i) = fresh;
    }
    ++launched_;
  }

  void count_down() {
    while (!events_.empty() && events_.top().when <= now_) {
      const Event event = events_.top();
      events_.pop();
      ResidentWarp& target = warps_[static_cast<size_t>(event.warp)];
      if (target.generation == event.generation) --target.scoreboards[static_cast<size_t>(event.scoreboard)];
    }
  }

  bool waits_for_scoreboard(const ResidentWarp& warp, const Instruction& instruction) const {
    for (int i = 0; i < kNumScoreboards; ++i) {
      if ((instruction.wait_mask >> i & 1) != 0 && warp.scoreboards[static_cast<size_t>(i)] > 0) return true;
    }
    if (instruction.opcode == nullptr || instruction.opcode->cost != Cost::kScoreboardWait) return false;
    const auto& operands = instruction.operands;
    const int most = operands.size() > 1 ? static_cast<int>(operands[1].immediate) : 0;
    return warp.scoreboards[static_cast<size_t>(operands.at(0).index)] > most;
  }

  Obstacle obstacle(const SubCore& core, const ResidentWarp& warp) const {
    if (warp.ready > now_) return Obstacle::kNotReady;
    const Instruction& instruction = instruction_of(warp.next());
    if (waits_for_scoreboard(warp, instruction)) return Obstacle::kScoreboard;
    const Pipe pipe = pipe_of(instruction);
    if (core.pipe_free[static_cast<size_t>(pipe)] > now_) return Obstacle::kPipe;
    const bool is_full = static_cast<int>(core.memory_queue.size()) >= timing_.memory_queue;
    return pipe == Pipe::kMemory && is_full ? Obstacle::kQueue : Obstacle::kNone;
  }

  // An instruction that no lane executes may be unknown to the simulator.
  static Pipe pipe_of(const Instruction& instruction) {
    return instruction.opcode != nullptr ? instruction.opcode->pipe : Pipe::kAlu;
  }

  void count_wait(Obstacle obstacle, const Record& record) {
    if (waits_ != nullptr) ++waits_[record.instruction];
    if (obstacle == Obstacle::kScoreboard) time_.wait_scoreboard += 1;
    if (obstacle == Obstacle::kPipe) time_.wait_pipe[static_cast<size_t>(pipe_of(instruction_of(record)))] += 1;
    if (obstacle == Obstacle::kQueue) time_.wait_queue += 1;
  }

  // Issues from the previous warp if it is ready and did not yield, otherwise from the oldest ready warp. Returns
  // whether an instruction was issued.
  bool cycle(SubCore& core) {
    while (!core.memory_queue.empty() && core.memory_queue.top() <= now_) core.memory_queue.pop();
    int chosen = -1;
    for (const int candidate : core.warps) {
      const ResidentWarp& warp = warps_[static_cast<size_t>(candidate)];
      if (warp.done || warp.at_barrier) continue;
      const Obstacle found = obstacle(core, warp);
      if (found != Obstacle::kNone) {
        count_wait(found, warp.next());
      } else if (chosen < 0 || goes_before(core, candidate, chosen)) {
        chosen = candidate;
      }
    }
    if (chosen < 0) {
      time_.idle_slots += 1;
      return false;
    }
    issue(core, chosen);
    return true;
  }

  bool goes_before(const SubCore& core, int a, int b) const {
    if (a == core.last || b == core.last) return a == core.last;
    return warps_[static_cast<size_t>(a)].age < warps_[static_cast<size_t>(b)].age;  // otherwise a > b
  }

  int occupancy(const Instruction& instruction, bool has_effect) const {
    int cycles = instruction.occupancy;
    const Cost cost = instruction.opcode != nullptr ? instruction.opcode->cost : Cost::kFixed;
    const Pipe pipe = pipe_of(instruction);
    if (cost == Cost::kConversion) {
      cycles = timing_.conversion_occupancy;
    } else if (pipe == Pipe::kSpecial) {
      cycles = timing_.special_function_occupancy;
    } else if (pipe == Pipe::kMemory) {
      cycles = timing_.memory_occupancy;
    } else if (pipe == Pipe::kTensor && instruction.occupancy == 2) {
      cycles = timing_.tensor_occupancy;
    }
    return has_effect || pipe == Pipe::kControl ? cycles : std::min(cycles, 2);
  }

  Completion complete(const Trace& trace, const Record& record, int occupancy) {
    const Instruction& instruction = instruction_of(record);
    const auto access = [&]() -> const Access& { return trace.accesses.at(record.detail); };
    Completion completion{now_ + occupancy, now_ + occupancy + 2, 0};
    if (record.lanes == 0) return completion;
    switch (instruction.opcode->cost) {
      case Cost::kSpecialFunction:
      case Cost::kConversion:
        return {now_ + timing_.special_function_latency + occupancy, now_ + occupancy + 4, 0};
      case Cost::kSharedLoad:
      case Cost::kSharedStore:
      case Cost::kSharedAtomic:
        return memory_.shared(instruction, access(), now_);
      case Cost::kShuffle:
        return memory_.shuffle(now_);
      case Cost::kGlobalLoad:
        return memory_.global_load(trace, access(), now_);
      case Cost::kGlobalStore:
        return memory_.global_store(access(), now_);
      case Cost::kLocal:
        return memory_.local(instruction, now_);
      case Cost::kConstantLoad:
        return {now_ + timing_.constant_load_latency, completion.operands, now_ + 4};
      case Cost::kSpecialRegister:
        return {now_ + timing_.special_register_latency, completion.operands, now_ + 4};
      default:
        return completion;
    }
  }

  void set_scoreboard(int number, int scoreboard, Cycles when) {
    if (scoreboard >= kNumScoreboards) return;
    ResidentWarp& warp = warps_[static_cast<size_t>(number)];
    ++warp.scoreboards[static_cast<size_t>(scoreboard)];
    events_.push({when, number, warp.generation, scoreboard});
  }

  void issue(SubCore& core, int number) {
    ResidentWarp& warp = warps_[static_cast<size_t>(number)];
    const Record record = warp.next();
    const Instruction& instruction = instruction_of(record);
    const auto pipe = static_cast<size_t>(pipe_of(instruction));
    core.last = instruction.yields ? -1 : number;
    const int cycles = occupancy(instruction, record.lanes != 0);
    core.pipe_free[pipe] = now_ + cycles;
    time_.issued += 1;
    time_.pipe_busy[pipe] += cycles;

    const Completion completion = complete(*warp.trace, record, cycles);
    if (completion.queue != 0) core.memory_queue.push(completion.queue);
    set_scoreboard(number, instruction.write_scoreboard, completion.result);
    set_scoreboard(number, instruction.read_scoreboard, completion.operands);
    advance(warp, record);
  }

  void advance(ResidentWarp& warp, const Record& record) {
    const Instruction& instruction = instruction_of(record);
    const int stall = std::max(1, instruction.stall);
    warp.ready = now_ + stall;
    if (++warp.position >= warp.records->size()) {
      warp.done = true;
      end_warp(warp.slot);
      return;
    }
    const bool jumped = pipe_of(instruction) == Pipe::kControl && warp.next().instruction != record.instruction + 1;
    if (jumped) warp.ready += timing_.branch_latency;
    if (instruction.opcode != nullptr && instruction.opcode->cost == Cost::kBarrier) {
      if (record.detail != kNoDetail) arrive(warp, warp.trace->arrivals.at(record.detail));
      release_barriers(warp.slot);
    }
  }

  void end_warp(int slot) {
    Slot& cta = slots_[static_cast<size_t>(slot)];
    if (--cta.warps_left == 0) {
      ++finished_;
      launch(slot, now_ + 1);
    } else {
      release_barriers(slot);  // the others wait for one warp fewer
    }
  }

  void arrive(ResidentWarp& warp, const Arrival& arrival) {
    if (arrival.waits) {
      warp.at_barrier = true;
      warp.arrival = arrival;
    } else {
      ++slots_[static_cast<size_t>(warp.slot)].arrived[static_cast<size_t>(arrival.barrier)];
    }
  }

  void release_barriers(int slot) {
    Slot& cta = slots_[static_cast<size_t>(slot)];
    int alive = 0;
    for (int i = 0; i < warps_per_cta_; ++i) alive += warp(slot, i).done ? 0 : 1;
    for (int barrier = 0; barrier < kNumCtaBarriers; ++barrier) {
      int come = cta.arrived[static_cast<size_t>(barrier)], wanted = 0;
      bool someone_waits = false;
      const auto waits_here = [&](const ResidentWarp& warp) {
        return !warp.done && warp.at_barrier && warp.arrival.barrier == barrier;
      };
      for (int i = 0; i < warps_per_cta_; ++i) {
        if (!waits_here(warp(slot, i))) continue;
        someone_waits = true;
        ++come;
        wanted = std::max(wanted, warp(slot, i).arrival.threads / kLanes);
      }
      if (!someone_waits || come < (wanted != 0 ? wanted : alive)) continue;
      cta.arrived[static_cast<size_t>(barrier)] = 0;
      for (int i = 0; i < warps_per_cta_; ++i) {
        if (!waits_here(warp(slot, i))) continue;
        warp(slot, i).at_barrier = false;
        warp(slot, i).ready = std::max(warp(slot, i).ready, now_ + timing_.barrier_latency);
      }
    }
  }

  // The first cycle from now on in which anything can change.
  Cycles next_event() const {
    constexpr Cycles kNever = std::numeric_limits<Cycles>::max();
    Cycles soonest = events_.empty() ? kNever : events_.top().when;
    for (const ResidentWarp& warp : warps_) {
      if (!warp.done && !warp.at_barrier && warp.ready >= now_) soonest = std::min(soonest, warp.ready);
    }
    for (const SubCore& core : sub_cores_) {
      for (const Cycles free : core.pipe_free) soonest = free >= now_ ? std::min(soonest, free) : soonest;
      if (!core.memory_queue.empty()) soonest = std::min(soonest, core.memory_queue.top());
    }
    if (soonest == kNever) fail("the warps of the SM wait for each other forever.");
    return soonest;
  }

  const Program& program_;
  const std::vector<const Trace*>& ctas_;
  const fa_sim_timing timing_;
  uint64_t* const waits_;
  fa_sim_time time_ = {};
  MemoryPath memory_;
  int warps_per_cta_ = 0;
  std::vector<ResidentWarp> warps_;
  std::vector<Slot> slots_;
  std::array<SubCore, kSubCores> sub_cores_;
  SoonestFirst<Event> events_;
  size_t launched_ = 0, finished_ = 0;
  Cycles now_ = 0;
};

}  // namespace

fa_sim_time time_sm(const Program& program, const std::vector<const Trace*>& ctas, int resident,
                    const fa_sim_timing& timing, uint64_t* waits) {
  return Sm(program, ctas, resident, timing, waits).run();
}

}  // namespace volta_sim

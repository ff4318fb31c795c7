#include "cta.h"

#include <algorithm>
#include <cinttypes>
#include <string>

#include "failure.h"

namespace volta_sim {
namespace {

class WarpRunner {
 public:
  WarpRunner(const Program& program, Machine& machine, Cta& cta, Warp& warp, uint64_t limit, Trace* trace)
      : program_(program), machine_(machine), cta_(cta), warp_(warp), limit_(limit), trace_(trace) {}

  // Runs until all lanes have exited or wait at a barrier of the CTA.
  void run() {
    for (;;) {
      release_meetings();
      if (warp_.groups.empty()) break;
      const Group group = next_group();
      if (group.lanes != 0) run_group(group);
    }
    if (warp_.at_barrier.empty() && !warp_.meetings.empty()) {
      const Meeting& meeting = warp_.meetings.front();
      fail("warp %d is deadlocked at 0x%04x: lanes 0x%08x wait for lanes 0x%08x, which never arrive.", warp_.number,
           meeting.address, meeting.lanes, meeting.expected & warp_.alive & ~meeting.lanes);
    }
  }

 private:
  // Releases each meeting whose expected lanes have all arrived.
  void release_meetings() {
    for (size_t i = 0; i < warp_.meetings.size();) {
      const Meeting meeting = warp_.meetings[i];
      const auto same_place = [&](const Meeting& other) { return other.address == meeting.address; };
      const uint32_t expected = meeting.expected & warp_.alive;
      uint32_t here = 0;
      for (const Meeting& other : warp_.meetings) here |= same_place(other) ? other.lanes : 0;
      if ((expected & ~here) != 0) {
        ++i;
        continue;
      }
      uint32_t released = 0;
      for (size_t j = 0; j < warp_.meetings.size();) {
        if (same_place(warp_.meetings[j]) && (warp_.meetings[j].lanes & expected) != 0) {
          released |= warp_.meetings[j].lanes;
          warp_.meetings.erase(warp_.meetings.begin() + static_cast<std::ptrdiff_t>(j));
        } else {
          ++j;
        }
      }
      warp_.groups.push_back({meeting.address + kInstructionBytes, released});
      i = 0;
    }
  }

  // The group at the lowest address, joined with all others at the same address.
  Group next_group() {
    auto& groups = warp_.groups;
    uint32_t address = groups.front().address, lanes = 0;
    for (const Group& group : groups) address = std::min(address, group.address);
    for (size_t i = 0; i < groups.size();) {
      if (groups[i].address == address) {
        lanes |= groups[i].lanes;
        groups.erase(groups.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        ++i;
      }
    }
    return {address, lanes & warp_.alive};
  }

  void run_group(Group group) {
    uint32_t meets_others = ~0u;  // the next address at which another group waits to run
    for (const Group& other : warp_.groups) meets_others = std::min(meets_others, other.address);
    for (bool rescheduled = false; !rescheduled; group.address += kInstructionBytes) {
      if (group.address == meets_others) {
        warp_.groups.push_back(group);
        return;
      }
      rescheduled = execute(group);
    }
  }

  const Instruction& at(uint32_t address) const {
    const size_t index = address / kInstructionBytes;
    if (address % kInstructionBytes != 0 || index >= program_.size()) {
      fail("warp %d jumps to 0x%x, where there is no code.", warp_.number, address);
    }
    return program_[index];
  }

  bool execute(const Group& group) {
    const Instruction& instruction = at(group.address);
    if (++warp_.instructions > limit_) {
      fail("warp %d has executed %" PRIu64 " instructions, so it probably never ends.", warp_.number, limit_);
    }
    uint32_t guard = warp_.predicates[static_cast<size_t>(instruction.guard)];
    if (instruction.guard_negated) guard = ~guard;
    Step step{instruction, machine_, cta_, warp_, trace_, group.lanes, group.lanes & guard, ~0u, false};
    try {
      if (step.lanes != 0) {
        if (!instruction.refusal.empty()) throw Failure(instruction.refusal);
        instruction.opcode->execute(step);
      }
    } catch (const Failure& failure) {
      char where[64];
      std::snprintf(where, sizeof(where), " at 0x%04x, warp %d: ", instruction.address, warp_.number);
      throw Failure(instruction.text + where + failure.what());
    }
    if (trace_ != nullptr) {
      const auto index = static_cast<uint32_t>(&instruction - program_.data());
      trace_->warps[static_cast<size_t>(warp_.number)].push_back({index, step.lanes, step.detail});
    }
    return step.rescheduled;
  }

  const Program& program_;
  Machine& machine_;
  Cta& cta_;
  Warp& warp_;
  uint64_t limit_;
  Trace* trace_;
};

Cta make_cta(const Launch& launch, uint32_t x, uint32_t y, uint32_t z) {
  constexpr uint8_t kNeverWritten = 0xa5;  // makes reads before the first write visible
  Cta cta;
  cta.x = x;
  cta.y = y;
  cta.z = z;
  cta.shared.assign(launch.shared_bytes, kNeverWritten);
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  cta.warps.resize((threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < cta.warps.size(); ++i) {
    Warp& warp = cta.warps[i];
    const uint32_t lanes = std::min<uint32_t>(kLanes, threads - static_cast<uint32_t>(i) * kLanes);
    warp.number = static_cast<int>(i);
    warp.alive = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    warp.predicates[kTruePredicate] = kAllLanes;
    warp.local.assign(size_t{kLanes} * launch.local_bytes, 0);
    warp.groups.push_back({0, warp.alive});
  }
  return cta;
}

bool waits_at(const Warp& warp, int barrier) { return !warp.at_barrier.empty() && warp.cta_barrier == barrier; }

// Releases the barriers at which enough threads have arrived. Returns whether there were any.
bool release_barriers(Cta& cta) {
  int alive = 0;
  for (const Warp& warp : cta.warps) alive += warp.alive != 0 ? kLanes : 0;
  bool released = false;
  for (int barrier = 0; barrier < kNumCtaBarriers; ++barrier) {
    int come = cta.arrived[static_cast<size_t>(barrier)], wanted = 0;
    bool someone_waits = false;
    for (const Warp& warp : cta.warps) {
      if (!waits_at(warp, barrier)) continue;
      someone_waits = true;
      come += kLanes;
      wanted = std::max(wanted, warp.barrier_threads);
    }
    if (!someone_waits || come < (wanted != 0 ? wanted : alive)) continue;
    cta.arrived[static_cast<size_t>(barrier)] = 0;
    for (Warp& warp : cta.warps) {
      if (!waits_at(warp, barrier)) continue;
      warp.groups.insert(warp.groups.end(), warp.at_barrier.begin(), warp.at_barrier.end());
      warp.at_barrier.clear();
    }
    released = true;
  }
  return released;
}

[[noreturn]] void report_deadlock(const Cta& cta) {
  std::string waiting;
  for (const Warp& warp : cta.warps) {
    if (warp.at_barrier.empty()) continue;
    waiting += (waiting.empty() ? "warp " : ", warp ") + std::to_string(warp.number) + " at barrier " +
               std::to_string(warp.cta_barrier);
  }
  fail("the CTA is deadlocked: %.300s, and no other warp will arrive.", waiting.c_str());
}

}  // namespace

void run_cta(const Program& program, Machine& machine, uint32_t x, uint32_t y, uint32_t z, uint64_t limit,
             Trace* trace) {
  Cta cta = make_cta(machine.launch, x, y, z);
  if (trace != nullptr) trace->warps.resize(cta.warps.size());
  for (;;) {
    for (Warp& warp : cta.warps) {
      if (warp.groups.empty()) continue;
      WarpRunner(program, machine, cta, warp, limit, trace).run();
      for (const int barrier : warp.arrivals) cta.arrived[static_cast<size_t>(barrier)] += kLanes;
      warp.arrivals.clear();
    }
    const bool someone_waits =
        std::any_of(cta.warps.begin(), cta.warps.end(), [](const Warp& warp) { return !warp.at_barrier.empty(); });
    if (!someone_waits) return;
    if (!release_barriers(cta)) report_deadlock(cta);
  }
}

}  // namespace volta_sim

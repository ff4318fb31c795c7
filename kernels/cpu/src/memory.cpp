#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

namespace fastattention {
namespace {

// The size on x86-64, and on aarch64 with 4 KiB pages. Elsewhere the kernel rounds by itself.
constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
constexpr int kMaxNodes = 1024;

// From <linux/mempolicy.h> and <linux/mman.h>. libnuma is not a dependency, and older headers lack MADV_COLLAPSE.
constexpr int kPreferred = 1, kInterleave = 3;
constexpr unsigned kMovePages = 1u << 1;  // MPOL_MF_MOVE
constexpr unsigned kOfAddress = 1u << 1;  // MPOL_F_ADDR
constexpr int kCollapse = 25;             // MADV_COLLAPSE, Linux 6.1

struct NodeMask {
  static constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long words[kMaxNodes / kBits] = {};
  void set(int node) { words[node / kBits] |= 1ul << node % kBits; }
  bool has(int node) const { return (words[node / kBits] >> node % kBits & 1) != 0; }
};

class Reason {
 public:
  void add(const std::string& sentence) { text_ += (text_.empty() ? "" : " ") + sentence; }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

std::string error_text() { return std::strerror(errno); }

// Sets the policy for pages of the range that are touched from now on and, with move, for existing pages. Returns the
// number of nodes in the policy, 0 if it could not be set.
int set_policy(void* address, size_t bytes, const std::vector<int>& nodes, bool move, Reason& reason) {
  NodeMask wanted;
  for (const int node : nodes) {
    if (node < 0 || node >= kMaxNodes) {
      reason.add("There is no NUMA node " + std::to_string(node) + ".");
      return 0;
    }
    wanted.set(node);
  }
  const int mode = nodes.size() > 1 ? kInterleave : kPreferred;  // not "bind": a full node must not end the process
  if (syscall(SYS_mbind, address, bytes, mode, wanted.words, kMaxNodes + 1, move ? kMovePages : 0u) != 0) {
    reason.add("Memory could not be assigned to NUMA nodes: " + error_text() + ".");
    return 0;
  }
  // The kernel silently ignores nodes that have no memory or that the cpuset forbids.
  int found_mode = 0;
  NodeMask found;
  if (syscall(SYS_get_mempolicy, &found_mode, found.words, kMaxNodes + 1, address, kOfAddress) != 0) {
    return static_cast<int>(nodes.size());
  }
  int count = 0;
  for (const int node : nodes) {
    if (found.has(node)) {
      ++count;
    } else {
      reason.add("NUMA node " + std::to_string(node) + " has no memory for this process.");
    }
  }
  return count;
}

// Bytes of [begin, end) in huge pages, or -1 if unknown. A mapping that extends beyond the range counts with all its
// huge pages, but with at most the bytes that it shares with the range.
int64_t huge_bytes(uintptr_t begin, uintptr_t end) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> smaps(std::fopen("/proc/self/smaps", "re"), &std::fclose);
  if (smaps == nullptr) return -1;
  char line[512];
  int64_t total = 0, overlap = 0;
  while (std::fgets(line, sizeof(line), smaps.get()) != nullptr) {
    uintptr_t from = 0, to = 0;
    int64_t kib = 0;
    if (std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      overlap = static_cast<int64_t>(std::min(to, end)) - static_cast<int64_t>(std::max(from, begin));
    } else if (overlap > 0 && std::sscanf(line, "AnonHugePages: %" SCNd64, &kib) == 1) {
      total += std::min(kib * 1024, overlap);
    }
  }
  return total;
}

std::string why_no_huge_pages() {
  char setting[64] = "";
  const int file = open("/sys/kernel/mm/transparent_hugepage/enabled", O_RDONLY | O_CLOEXEC);
  if (file < 0) return "This Linux kernel has no transparent huge pages.";
  const ssize_t length = read(file, setting, sizeof(setting) - 1);
  close(file);
  if (length > 0 && std::strstr(setting, "[never]") != nullptr) {
    return "Transparent huge pages are off; set /sys/kernel/mm/transparent_hugepage/enabled to madvise or always.";
  }
  return "The kernel had no free huge pages for the rest, or the process may not use them.";
}

fa_cpu_placement report(int64_t huge, int nodes, const Reason& reason) {
  fa_cpu_placement achieved = {};
  achieved.huge_bytes = huge;
  achieved.num_nodes = nodes;
  std::snprintf(achieved.reason, sizeof(achieved.reason), "%s", reason.text().c_str());
  return achieved;
}

}  // namespace

fa_cpu_placement place_memory(void* address, int64_t bytes, const std::vector<int>& nodes, const Zero& zero) {
  Reason reason;
  const uintptr_t first = reinterpret_cast<uintptr_t>(address);
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (first + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (begin >= end) {
    if (zero) zero(address, bytes);
    reason.add("The range does not contain a whole huge page.");
    return report(0, 0, reason);
  }
  void* const inside = reinterpret_cast<void*>(begin);
  const size_t inside_bytes = end - begin;

  const int nodes_set = nodes.empty() ? 0 : set_policy(inside, inside_bytes, nodes, !zero, reason);
  const bool advised = madvise(inside, inside_bytes, MADV_HUGEPAGE) == 0;
  if (zero) {
    // Locked pages cannot be returned to the kernel. They stay in place and are zeroed all the same.
    madvise(inside, inside_bytes, MADV_DONTNEED);
    zero(address, bytes);
  } else if (advised) {
    // Fails before Linux 6.1, where only the kernel's daemon makes huge pages, at a time of its choice.
    madvise(inside, inside_bytes, kCollapse);
  }
  const int64_t huge = huge_bytes(begin, end);
  if (huge < static_cast<int64_t>(inside_bytes)) reason.add(why_no_huge_pages());
  return report(huge, nodes_set, reason);
}

}  // namespace fastattention

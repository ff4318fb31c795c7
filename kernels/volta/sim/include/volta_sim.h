// A simulated V100: runs the machine code of an sm_70 kernel on host memory and estimates its time.
//
// Every function returns 0 on success. Otherwise it returns -1, and fa_sim_error gives the reason in one sentence.
// Times are cycles of one SM.
#ifndef VOLTA_SIM_H
#define VOLTA_SIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FA_SIM_NUM_PIPES 7

// Parameters of the model of one SM. fa_sim_default_timing sets the defaults; README.md says where they come from.
typedef struct fa_sim_timing {
  int32_t shared_load_latency;         // cycles from issue to use, without bank conflicts
  int32_t shuffle_latency;             // cycles
  int32_t special_function_latency;    // cycles, beyond its occupancy
  int32_t l1_latency;                  // cycles
  int32_t l2_latency;                  // cycles after the last sector's turn at L2
  int32_t constant_load_latency;       // cycles, for constants at computed addresses
  int32_t special_register_latency;    // cycles
  int32_t barrier_latency;             // cycles from the last arrival to the next instruction
  int32_t branch_latency;              // cycles, if the branch is taken
  int32_t memory_queue;                // entries of a sub-core's queue to the memory pipes
  int32_t special_function_occupancy;  // cycles of its pipe that a warp instruction holds
  int32_t conversion_occupancy;        // the same for conversions to and from fp16
  int32_t memory_occupancy;            // the same for issue into the memory queue
  int32_t tensor_occupancy;            // the same for one of the 4 steps of an mma.m8n8k4 with fp32 sums
  int32_t l1_kib;                      // data cache that shared memory leaves
  int32_t l1_bytes_per_cycle;          // global loads
  int32_t store_bytes_per_cycle;       // global stores
  int32_t reserved;                    // 0
  double l2_bytes_per_cycle;           // share of one SM when all SMs read
} fa_sim_timing;

typedef struct fa_sim_time {
  double cycles;
  double issued;                       // warp instructions
  double pipe_busy[FA_SIM_NUM_PIPES];  // cycles, summed over the 4 sub-cores; order of fa_sim_pipe_name
  double shared_busy;                  // cycles of the single path to shared memory and L1
  double l2_bytes;
  double l1_hits, l1_misses;           // sectors of 32 bytes
  double idle_slots;                   // sub-core cycles without an instruction
  double wait_scoreboard;              // warp cycles that instructions waited for a result
  double wait_pipe[FA_SIM_NUM_PIPES];  // warp cycles that they waited for their pipe
  double wait_queue;                   // warp cycles that they waited for space in the memory queue
} fa_sim_time;

// Facts about an instruction for a static estimate.
typedef struct fa_sim_instruction_info {
  int32_t pipe;
  int32_t occupancy;  // cycles that it occupies the pipe, with the default timing
  int32_t access;     // 0: none, 1: shared load, 2: shared store or atomic, 3: shuffle, 4: global load, 5: global store
  int32_t width;      // bytes per lane of a memory access
} fa_sim_instruction_info;

typedef struct fa_sim fa_sim;

fa_sim* fa_sim_create(void);
void fa_sim_destroy(fa_sim* sim);
const char* fa_sim_error(const fa_sim* sim);

// listing: a disassembly with lines "/*0010*/ IADD3 R0, R1, R2, RZ ;"; code: the same instructions, 16 bytes each.
int32_t fa_sim_load(fa_sim* sim, const char* listing, const void* code, uint64_t code_bytes);
int32_t fa_sim_num_instructions(const fa_sim* sim);
const char* fa_sim_instruction_text(const fa_sim* sim, int32_t index);
int32_t fa_sim_instruction(fa_sim* sim, int32_t index, fa_sim_instruction_info* info);
const char* fa_sim_pipe_name(int32_t pipe);  // null if there is no such pipe

// The contents of constant banks are copied. Mapped memory is used in place and must outlive all runs.
int32_t fa_sim_set_constants(fa_sim* sim, int32_t bank, const void* data, uint64_t bytes);
int32_t fa_sim_map(fa_sim* sim, uint64_t address, uint64_t bytes, void* host, int32_t writable);
int32_t fa_sim_unmap_all(fa_sim* sim);
// A warp that executes more instructions than this is considered endless.
int32_t fa_sim_set_instruction_limit(fa_sim* sim, uint64_t limit);
int32_t fa_sim_set_launch(fa_sim* sim, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes,
                          uint32_t local_bytes);

// Executes one CTA. trace: null, or receives the number of its trace, which the functions below take.
int32_t fa_sim_run(fa_sim* sim, uint32_t x, uint32_t y, uint32_t z, int32_t* trace);
int32_t fa_sim_drop_traces(fa_sim* sim);
// For each instruction of the kernel: how often warps executed it, and the wavefronts (shared memory) or sectors
// (global memory) that it moved.
int32_t fa_sim_executions(fa_sim* sim, int32_t trace, uint64_t* counts);
int32_t fa_sim_transactions(fa_sim* sim, int32_t trace, uint64_t* counts);

void fa_sim_default_timing(fa_sim_timing* timing);
// Computes the time of one SM that holds `resident` CTAs at a time and works through the given traces in order. waits:
// null, or receives for each instruction of the kernel the warp cycles that warps waited to issue it.
int32_t fa_sim_time_sm(fa_sim* sim, const int32_t* traces, int32_t num_traces, int32_t resident,
                       const fa_sim_timing* timing, fa_sim_time* time, uint64_t* waits);

#ifdef __cplusplus
}
#endif

#endif

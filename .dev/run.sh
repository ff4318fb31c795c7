set -e
cmake -S kernels/cpu -B /tmp/b -DCMAKE_BUILD_TYPE=Release >/dev/null && cmake --build /tmp/b -j16 2>&1 | grep -E "error|warning" || true
g++ -O2 -mf16c -mavx512f -I kernels/cpu/include .dev/bench.cpp -o /tmp/bench -L /tmp/b -lfastattention_cpu -Wl,-rpath,/tmp/b -lpthread
lscpu | grep -E "Model name|^CPU\(s\)|NUMA|L2|L3"; cat /sys/kernel/mm/transparent_hugepage/enabled
for t in 16 8 1; do for d in 128 64; do for g in 1 4 8; do for dt in bf16 f16; do timeout 60 /tmp/bench -hq $((8*g)) -d $d -dt $dt -isa amx,avx512,avx2 -page 128 -gb 4 -r 5 -t $t; [ $t = 1 ] && [ $d = 128 ] || true; done; done; done; [ $t = 8 ] && break; done
for dt in bf16 f16; do timeout 60 /tmp/bench -hq 32 -dt $dt -isa amx,avx512,avx2 -page 16 -gb 4 -r 5 -t 16;  timeout 60 /tmp/bench -hq 32 -dt $dt -isa amx,avx512,avx2 -page 128 -s 8192 -b 16 -gb 4 -r 5 -t 16; done
for g in 1 4 8; do timeout 60 /tmp/bench -hq $((8*g)) -dt bf16 -isa amx,avx512,avx2 -page 128 -gb 2 -r 5 -t 1; done
for q in 2048 8192; do timeout 60 /tmp/bench -hq 32 -dt bf16 -q $q -s $q -isa amx,avx512,avx512_bf16,avx2 -r 5 -t 16; timeout 60 /tmp/bench -hq 32 -dt f16 -q $q -s $q -isa avx512,avx2 -r 5 -t 16; done

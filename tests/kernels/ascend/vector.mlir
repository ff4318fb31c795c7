func.func @program_mix_aiv(%arg0: i64, %arg3: memref<?xf16, #hivm.address_space<gm>>, %arg4: memref<?xi32, #hivm.address_space<gm>>) {
  %c0_i64 = arith.constant 0 : i64
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %1 = memref.reinterpret_cast %arg4 to offset: [%c0], sizes: [1], strides: [1] : memref<?xi32, #hivm.address_space<gm>> to memref<1xi32, #hivm.address_space<gm>>
  %2 = memref.load %1[%c0] : memref<1xi32, #hivm.address_space<gm>>
  %3 = arith.index_cast %2 : i32 to index
  %4 = affine.min affine_map<()[s0] -> ((s0 + 1) ceildiv 2, 4)>()[%3]
  %5 = hivm.hir.pointer_cast(%c0_i64) : memref<128xf32, #hivm.address_space<ub>>
  %6 = memref_ext.alloc_workspace() from %arg0 offset = [%c0] : from memref<?xi8, #hivm.address_space<gm>> to memref<128xf32, #hivm.address_space<gm>>
  scf.for %arg9 = %c0 to %4 step %c1 {
    hivm.hir.sync_block_wait[<VECTOR>, <PIPE_FIX>, <PIPE_S>] flag = 1
    hivm.hir.load ins(%6 : memref<128xf32, #hivm.address_space<gm>>) outs(%5 : memref<128xf32, #hivm.address_space<ub>>) core_type = <VECTOR>
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_V>, <EVENT_ID0>]
    hivm.hir.vexp ins(%5 : memref<128xf32, #hivm.address_space<ub>>) outs(%5 : memref<128xf32, #hivm.address_space<ub>>)
  }
  return
}

func.func @program_mix_aic(%arg0: i64, %arg3: memref<?xf16, #hivm.address_space<gm>>, %arg4: memref<?xi32, #hivm.address_space<gm>>) {
  %c0_i64 = arith.constant 0 : i64
  %c-1_i64 = arith.constant -1 : i64
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c16 = arith.constant 16 : index
  %true = arith.constant true
  %1 = memref.reinterpret_cast %arg4 to offset: [%c0], sizes: [1], strides: [1] : memref<?xi32, #hivm.address_space<gm>> to memref<1xi32, #hivm.address_space<gm>>
  %2 = memref.load %1[%c0] : memref<1xi32, #hivm.address_space<gm>>
  %3 = arith.index_cast %2 : i32 to index
  %4 = affine.min affine_map<()[s0] -> ((s0 + 1) ceildiv 2, 4)>()[%3]
  %5 = hivm.hir.pointer_cast(%c0_i64) : memref<1x1x16x16xf16, #hivm.address_space<cbuf>>
  %6 = hivm.hir.pointer_cast(%c0_i64) : memref<1x1x16x16xf32, #hivm.address_space<cc>>
  %7 = memref.reinterpret_cast %arg3 to offset: [%c0], sizes: [16, 16], strides: [16, 1] : memref<?xf16, #hivm.address_space<gm>> to memref<16x16xf16, #hivm.address_space<gm>>
  %8 = memref_ext.alloc_workspace() from %arg0 offset = [%c0] : from memref<?xi8, #hivm.address_space<gm>> to memref<16x16xf32, #hivm.address_space<gm>>
  scf.for %arg9 = %c0 to %4 step %c1 {
    hivm.hir.nd2nz {dst_continuous} ins(%7 : memref<16x16xf16, #hivm.address_space<gm>>) outs(%5 : memref<1x1x16x16xf16, #hivm.address_space<cbuf>>) init_out_buffer = false
    hivm.hir.set_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_MTE2>, <PIPE_MTE1>, <EVENT_ID0>]
    hivm.hir.mmadL1 ins(%5, %5, %true, %c16, %c16, %c16 : memref<1x1x16x16xf16, #hivm.address_space<cbuf>>, memref<1x1x16x16xf16, #hivm.address_space<cbuf>>, i1, index, index, index) outs(%6 : memref<1x1x16x16xf32, #hivm.address_space<cc>>) sync_related_args(%c-1_i64, %c-1_i64, %c-1_i64, %c-1_i64 : i64, i64, i64, i64)
    hivm.hir.set_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    hivm.hir.wait_flag[<PIPE_M>, <PIPE_FIX>, <EVENT_ID0>]
    hivm.hir.fixpipe {dma_mode = #hivm.dma_mode<nz2nd>} ins(%6 : memref<1x1x16x16xf32, #hivm.address_space<cc>>) outs(%8 : memref<16x16xf32, #hivm.address_space<gm>>)
    hivm.hir.sync_block_set[<CUBE>, <PIPE_FIX>, <PIPE_S>] flag = 1
  }
  return
}

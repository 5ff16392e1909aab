"""Excerpts of compiled text, as XLA writes it for TPU and GPU.

Each is cut from a compiled step (jax 0.10.2; libtpu 0.0.42 for v5e and v6e, the CUDA
plugin for H100) to the lines that matter, with fewer state arrays.
"""
# ruff: noqa: E501

# v5e: a start, a matrix multiplication that carries the gather along, and a done.
FUSED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%fused_computation.504 (p.0: bf16[128,2048]) -> (bf16[128,2048], bf16[512,2048], u32[]) {
  %p.0 = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.157 = bf16[512,2048]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/transpose(jvp(fsdp:regather:blocks.1))/all_gather"}
  ROOT %custom-call.39 = (bf16[128,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) custom-call(%all-gather.157), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.384 (p.1: bf16[128,2048], p.2: bf16[512,2048], p.3: u32[], p.4: bf16[256,512], p.5: bf16[512,2048]) -> (bf16[256,2048], bf16[128,2048], bf16[512,2048], u32[]) {
  %p.4 = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(3)
  %p.5 = bf16[512,2048]{1,0:T(8,128)(2,1)} parameter(4)
  %convolution.73 = bf16[256,2048]{1,0:T(8,128)(2,1)} convolution(%p.4, %p.5), dim_labels=bf_io->bf
  %p.1 = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.2 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.159 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} all-gather(%p.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/transpose(jvp(fsdp:regather:blocks.1))/all_gather"}
  %p.3 = u32[]{:S(2)} parameter(2)
  ROOT %tuple.185 = (bf16[256,2048]{1,0:T(8,128)(2,1)}, bf16[128,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) tuple(%convolution.73, %p.1, %all-gather.159, %p.3)
}

%fused_computation.506 (p.6: bf16[128,2048], p.7: bf16[512,2048], p.8: u32[]) -> bf16[512,2048] {
  %p.6 = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p.7 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.161 = bf16[512,2048]{1,0:T(8,128)(2,1)} all-gather(%p.6), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/transpose(jvp(fsdp:regather:blocks.1))/all_gather"}
  %p.8 = u32[]{:S(2)} parameter(2)
  ROOT %custom-call.41 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} custom-call(%p.6, %p.7, %all-gather.161, %p.8), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (a: bf16[128,2048], b: bf16[256,512], c: bf16[512,2048]) -> bf16[512,2048] {
  %a = bf16[128,2048]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[512,2048]{1,0:T(8,128)(2,1)} parameter(2)
  %async-collective-start.8 = (bf16[128,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%a), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.504, backend_config={"aliasing_operands":{"lists":[{"indices":["0","1"]}]}}
  %get-tuple-element.1 = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start.8), index=0
  %get-tuple-element.2 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%async-collective-start.8), index=1
  %get-tuple-element.3 = u32[]{:S(2)} get-tuple-element(%async-collective-start.8), index=2
  %fusion.384 = (bf16[256,2048]{1,0:T(8,128)(2,1)}, bf16[128,2048]{1,0:T(8,128)(2,1)S(1)}, bf16[512,2048]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) fusion(%get-tuple-element.1, %get-tuple-element.2, %get-tuple-element.3, %b, %c), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (2, {})}, calls=%async_collective_fusion.384, backend_config={"window_config":{"estimated_cycles":"10168"}}
  %get-tuple-element.4 = bf16[128,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%fusion.384), index=1
  %get-tuple-element.5 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%fusion.384), index=2
  %get-tuple-element.6 = u32[]{:S(2)} get-tuple-element(%fusion.384), index=3
  ROOT %async-collective-done.8 = bf16[512,2048]{1,0:T(8,128)(2,1)S(1)} fusion(%get-tuple-element.4, %get-tuple-element.5, %get-tuple-element.6), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%fused_computation.506, metadata={op_name="jit(step)/shard_map/transpose(jvp(fsdp:regather:blocks.1))/all_gather"}
}
"""

# v5e with one mesh axis per torus dimension: the first stage of a reduce-scatter is a
# fusion without a name of its own, padded, with a permutation that puts the rows right.
SCATTERED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%region_46.47 (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}

%all-reduce-scatter.6 (input: bf16[4096,1024]) -> bf16[1032,1024] {
  %input = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %constant.461 = bf16[] constant(0)
  %pad.73 = bf16[4128,1024]{1,0:T(8,128)(2,1)} pad(%input, %constant.461), padding=0_32x0_0
  %all-reduce.21 = bf16[4128,1024]{1,0:T(8,128)(2,1)} all-reduce(%pad.73), channel_id=11, replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}, to_apply=%region_46.47
  %partition-id.22 = u32[] partition-id()
  %constant.0 = u32[] constant(0)
  ROOT %dynamic-slice.62 = bf16[1032,1024]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.21, %partition-id.22, %constant.0), dynamic_slice_sizes={1032,1024}
}

ENTRY %main (a: bf16[4096,1024]) -> bf16[256,1024] {
  %a = bf16[4096,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %fusion.6 = bf16[1032,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.6, backend_config={"collective_algorithm_config":{"emitter":"SingleInputAllReduceScatterFusion"}}
  %slice.248 = bf16[24,1024]{1,0:T(8,128)(2,1)S(1)} slice(%fusion.6), slice={[1008:1032], [0:1024]}
  %collective-permute-start.6 = (bf16[24,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[24,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) collective-permute-start(%slice.248), channel_id=1, source_target_pairs={{0,4},{4,8}}
  %collective-permute-done.6 = bf16[24,1024]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%collective-permute-start.6)
  %concatenate.87 = bf16[1056,1024]{1,0:T(8,128)(2,1)S(1)} concatenate(%collective-permute-done.6, %fusion.6), dimensions={0}
  %slice.3 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} slice(%concatenate.87), slice={[0:1024], [0:1024]}
  ROOT %reduce_scatter.353 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} reduce-scatter(%slice.3), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, dimensions={0}, to_apply=%region_46.47, metadata={op_name="jit(step)/shard_map/transpose(jvp(fsdp:reduce_scatter:blocks.1))/reduce_scatter"}
}
"""

# v6e with offload to SparseCore: a call on another thread.
SPARSECORE = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%called_computation.43 (p.0: bf16[128,1024], p.1: token[]) -> bf16[512,1024] {
  %p.1 = token[] parameter(1)
  %p.0 = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.105 = bf16[512,1024]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=5, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[128,1024], b: bf16[256,512], c: bf16[512,1024]) -> bf16[512,1024] {
  %a = bf16[128,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(1)
  %c = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(2)
  %prepare_start = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %prepare_done = token[] custom-call(%prepare_start), custom_call_target="PrepareAsyncCallDone"
  %all-gather.106.cloned.1.call-start = ((bf16[128,1024]{1,0:T(8,128)(2,1)}, token[]), bf16[512,1024]{1,0:T(8,128)(2,1)}) call-start(%a, %prepare_done), async_execution_thread="sparsecore", to_apply=%called_computation.43, metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}
  %convolution.1 = bf16[256,1024]{1,0:T(8,128)(2,1)} convolution(%b, %c), dim_labels=bf_io->bf, backend_config={"window_config":{"estimated_cycles":"7000"}}
  ROOT %all-gather.106.cloned.1.call-done = bf16[512,1024]{1,0:T(8,128)(2,1)} call-done(%all-gather.106.cloned.1.call-start), metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}
}
"""

# H100: a start and a done around a Triton matrix multiplication; two gradients in one
# reduce-scatter, whose names the compiler joined.
GPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%region_24.25 (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}

%gemm_fusion_dot.1_computation (p.0: bf16[1024,1024], p.1: bf16[1024,512]) -> bf16[1024,512] {
  %p.0 = bf16[1024,1024]{1,0} parameter(0)
  %p.1 = bf16[1024,512]{1,0} parameter(1)
  ROOT %dot.1 = bf16[1024,512]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[256,1024], b: bf16[1024,512]) -> (bf16[256,512], bf16[256,1024]) {
  %a = bf16[256,1024]{1,0} parameter(0)
  %b = bf16[1024,512]{1,0} parameter(1)
  %all-gather-start.1 = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}, backend_config={"collective_backend_config":{"is_sync":SYNC,"is_pipelined":false}}
  %gemm_fusion_dot.0 = bf16[1024,512]{1,0} fusion(%b, %b), kind=kCustom, calls=%gemm_fusion_dot.1_computation
  %all-gather-done.1 = bf16[1024,1024]{1,0} all-gather-done(%all-gather-start.1), metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}
  %gemm_fusion_dot.1 = bf16[1024,512]{1,0} fusion(%all-gather-done.1, %b), kind=kCustom, calls=%gemm_fusion_dot.1_computation
  %reduce-scatter-start = ((bf16[1024,512]{1,0}, bf16[1024,1024]{1,0}), (bf16[256,512]{1,0}, bf16[256,1024]{1,0})) reduce-scatter-start(%gemm_fusion_dot.1, %all-gather-done.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%region_24.25, metadata={op_name="jit(step)/shard_map/(transpose(jvp(fsdp:reduce_scatter:blocks.0))/reduce_scatter:transpose(jvp(fsdp:reduce_scatter:blocks.1))/reduce_scatter)"}, backend_config={"collective_backend_config":{"is_sync":false}}
  ROOT %reduce-scatter-done = (bf16[256,512]{1,0}, bf16[256,1024]{1,0}) reduce-scatter-done(%reduce-scatter-start)
}
"""

# Generic wrapper: the collective stands in a computation of its own.
WRAPPED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%wrapped_all_gather (p.0: f32[8,16]) -> f32[32,16] {
  %p.0 = f32[8,16]{1,0} parameter(0)
  ROOT %all-gather.1 = f32[32,16]{1,0} all-gather(%p.0), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, metadata={op_name="jit(step)/shard_map/jvp(fsdp:gather:blocks.1)/all_gather"}
}

ENTRY %main (a: f32[8,16]) -> f32[32,32] {
  %a = f32[8,16]{1,0} parameter(0)
  %async-start = ((f32[8,16]{1,0}), f32[32,16]{1,0}, u32[]) async-start(%a), calls=%wrapped_all_gather
  %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %async-done = f32[32,16]{1,0} async-done(%async-start)
  ROOT %dot.2 = f32[32,32]{1,0} dot(%async-done, %async-done), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""

# v5e, automatic partitioning: a matmul whose reduce-scatter is a loop of permutations,
# two steps of the ring an iteration.
WINDOWED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%cond_rs.24 (p.0: (u32[], bf16[128,2048], bf16[128,512], bf16[512,2048])) -> pred[] {
  %constant.4111 = u32[]{:T(128)} constant(8)
  %p.0 = (u32[]{:T(128)}, bf16[128,2048]{1,0}, bf16[128,512]{1,0}, bf16[512,2048]{1,0}) parameter(0)
  %get-tuple-element.1 = u32[]{:T(128)} get-tuple-element(%p.0), index=0
  ROOT %compare.170 = pred[]{:T(512)} compare(%get-tuple-element.1, %constant.4111), direction=LT
}

%wide.windowed_dot_general_body_rs.24 (p.1: (u32[], bf16[128,2048], bf16[128,512], bf16[512,2048])) -> (u32[], bf16[128,2048], bf16[128,512], bf16[512,2048]) {
  %p.1 = (u32[]{:T(128)}, bf16[128,2048]{1,0}, bf16[128,512]{1,0}, bf16[512,2048]{1,0}) parameter(0)
  %get-tuple-element.2 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  %get-tuple-element.3 = bf16[128,2048]{1,0} get-tuple-element(%p.1), index=1
  %get-tuple-element.4 = bf16[128,512]{1,0} get-tuple-element(%p.1), index=2
  %get-tuple-element.5 = bf16[512,2048]{1,0} get-tuple-element(%p.1), index=3
  %constant.2 = u32[]{:T(128)} constant(2)
  %collective-permute-start.96 = (bf16[128,2048]{1,0}, bf16[128,2048]{1,0}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.3), channel_id=307, source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/transpose(jvp())/dot_general"}
  %convolution.1 = bf16[128,2048]{1,0} convolution(%get-tuple-element.4, %get-tuple-element.5), dim_labels=bf_io->bf
  %collective-permute-done.96 = bf16[128,2048]{1,0} collective-permute-done(%collective-permute-start.96)
  %add.5 = bf16[128,2048]{1,0} add(%collective-permute-done.96, %convolution.1)
  %add.4360 = u32[]{:T(128)} add(%get-tuple-element.2, %constant.2)
  ROOT %tuple.984 = (u32[]{:T(128)}, bf16[128,2048]{1,0}, bf16[128,512]{1,0}, bf16[512,2048]{1,0}) tuple(%add.4360, %add.5, %get-tuple-element.4, %get-tuple-element.5)
}

ENTRY %main (a: bf16[128,2048], b: bf16[128,512], c: bf16[512,2048]) -> bf16[128,2048] {
  %a = bf16[128,2048]{1,0} parameter(0)
  %b = bf16[128,512]{1,0} parameter(1)
  %c = bf16[512,2048]{1,0} parameter(2)
  %constant.0 = u32[]{:T(128)} constant(0)
  %tuple.1 = (u32[]{:T(128)}, bf16[128,2048]{1,0}, bf16[128,512]{1,0}, bf16[512,2048]{1,0}) tuple(%constant.0, %a, %b, %c)
  %while.75 = (u32[]{:T(128)}, bf16[128,2048]{1,0}, bf16[128,512]{1,0}, bf16[512,2048]{1,0}) while(%tuple.1), condition=%cond_rs.24, body=%wide.windowed_dot_general_body_rs.24
  ROOT %get-tuple-element.9 = bf16[128,2048]{1,0} get-tuple-element(%while.75), index=1
}
"""

# v5e over one flat axis: gradients of two groups in one all-reduce without a name.
REDUCED = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%region_1.2 (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}

ENTRY %main (a: bf16[512,256], b: bf16[256,512]) -> (bf16[512,256], bf16[256,512]) {
  %a = bf16[512,256]{1,0} parameter(0)
  %b = bf16[256,512]{1,0} parameter(1)
  %convolution.1 = bf16[512,512]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
  %all-reduce.24 = (bf16[512,256]{1,0}, /*index=1*/bf16[256,512]{1,0}) all-reduce(%a, %b), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%region_1.2
  %get-tuple-element.1 = bf16[512,256]{1,0} get-tuple-element(%all-reduce.24), index=0
  %get-tuple-element.2 = bf16[256,512]{1,0} get-tuple-element(%all-reduce.24), index=1
  ROOT %tuple.1 = (bf16[512,256]{1,0}, bf16[256,512]{1,0}) tuple(%get-tuple-element.1, %get-tuple-element.2)
}
"""

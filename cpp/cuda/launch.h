// The border between the CUDA host files and the kernels of selection and packing: params in, work enqueued on a stream, no
// torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../params.h"

namespace dmattn::cuda {

// row_slots: int32 [batch, heads, Nq] scratch.
cudaError_t launch_pack_tiles(const PackParams& p, int32_t* row_slots, cudaStream_t stream);
cudaError_t launch_pack_bits(const PackParams& p, cudaStream_t stream);

// workspace: select_workspace_bytes(p) bytes of scratch.
size_t select_workspace_bytes(const SelectParams& p);
cudaError_t launch_select(const SelectParams& p, void* workspace, cudaStream_t stream);

}  // namespace dmattn::cuda

# Decides DMATTN_WITH_CUDA and defines dmattn_add_cuda(target), which adds the CUDA kernels to the ops library.
include(CheckLanguage)
include(cuda_choice)  # DMATTN_CUDA_ARCH_LIST and DMATTN_CUDA_CHOICE
set(DMATTN_WITH_CUDA OFF)
set(DMATTN_CUDA_VERSION "")
if(DMATTN_CUDA_ARCH_LIST)
  set(CMAKE_CUDA_ARCHITECTURES ${DMATTN_CUDA_ARCH_LIST})
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(DMATTN_WITH_CUDA ON)
    set(DMATTN_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  elseif(DMATTN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DMATTN_CUDA=ON, but no CUDA compiler was found. Set CUDACXX to the path of nvcc, or build without CUDA code: \
DMATTN_CUDA=OFF, with make CUDA=OFF.")
  else()
    set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=AUTO found no nvcc for the GPU (${DMATTN_CUDA_ARCH_LIST}) of the machine that built; set CUDACXX")
    set(DMATTN_CUDA_ARCH_LIST "")
  endif()
endif()
if(DMATTN_WITH_CUDA)
  message(STATUS "dmattn: CUDA ${DMATTN_CUDA_VERSION} for ${DMATTN_CUDA_ARCH_LIST} (${DMATTN_CUDA_CHOICE})")
else()
  message(STATUS "dmattn: no CUDA code: ${DMATTN_CUDA_CHOICE}")
endif()

function(dmattn_add_cuda target)
  include(instances)
  dmattn_sm80_instances(instance_sources instance_include)
  list(TRANSFORM DMATTN_OPS PREPEND cpp/cuda/ OUTPUT_VARIABLE host_sources)
  list(TRANSFORM host_sources APPEND .cpp)
  # Those that take longest come first, so that none of them is left for the end.
  target_sources(${target} PRIVATE
    cpp/cuda/common/reduce/sum.cu cpp/cuda/common/reduce/max.cu cpp/cuda/select/select.cu cpp/cuda/select/short.cu
    ${instance_sources}
    cpp/cuda/common/pack.cu cpp/cuda/key_lists/live_keys.cu cpp/cuda/common/gradient_sums.cu cpp/cuda/common/cache.cu
    cpp/cuda/common/merge_parts.cu cpp/cuda/key_lists/one_list.cu cpp/cuda/key_lists/compact_keys.cu cpp/cuda/key_lists/key_ranges.cu cpp/cuda/key_lists/key_unions.cu cpp/cuda/key_lists/query_lists.cu
    cpp/cuda/key_lists/tile_order.cu cpp/cuda/sm80/dispatch.cu cpp/cuda/indexer/scores.cu cpp/cuda/indexer/few_heads.cu
    cpp/cuda/indexer/choose.cu cpp/cuda/indexer/loss.cu
    ${host_sources} cpp/cuda/find_keys.cpp)
  target_include_directories(${target} PRIVATE cpp/cuda ${instance_include})
  set(cuda_targets ${target})
  # Hopper's instructions assemble for 90a alone.
  if(NOT CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a(-real)?(;|$)")
    message(STATUS "dmattn: no 90a among the CUDA targets, so no kernels for Hopper alone")
  else()
    dmattn_sm90_instances(sm90_sources sm90_include)
    add_library(dmattn_sm90 OBJECT cpp/cuda/sm90/dispatch.cu ${sm90_sources})
    set_target_properties(dmattn_sm90 PROPERTIES CUDA_ARCHITECTURES 90a-real)
    target_include_directories(dmattn_sm90 PRIVATE cpp/cuda ${sm90_include})
    target_compile_definitions(${target} PRIVATE DMATTN_WITH_SM90)
    target_compile_definitions(dmattn_sm90 PRIVATE DMATTN_WITH_SM90)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:dmattn_sm90>)
    list(APPEND cuda_targets dmattn_sm90)
  endif()
  set_target_properties(${cuda_targets} PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  foreach(each IN LISTS cuda_targets)
    target_include_directories(${each} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_compile_options(${each} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-gnu-unique --compress-mode=size -Xptxas=-warn-spills --expt-relaxed-constexpr>)
  endforeach()
endfunction()

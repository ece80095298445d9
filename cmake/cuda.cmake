# Decides DMATTN_WITH_CUDA and defines dmattn_add_cuda(target), which adds the CUDA rooms to the ops library.
include(CheckLanguage)
set(DMATTN_WITH_CUDA OFF)
set(DMATTN_CUDA_VERSION "")
set(DMATTN_CUDA_ARCH_LIST "")
if(NOT DMATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DMATTN_CUDA: expected AUTO, ON or OFF, got ${DMATTN_CUDA}")
endif()
if(NOT DMATTN_CUDA STREQUAL "OFF")
  set(CMAKE_CUDA_ARCHITECTURES ${DMATTN_CUDA_ARCHS})
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(DMATTN_WITH_CUDA ON)
    set(DMATTN_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
    set(DMATTN_CUDA_ARCH_LIST ${CMAKE_CUDA_ARCHITECTURES})
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  elseif(DMATTN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DMATTN_CUDA=ON, but no CUDA compiler was found; set CUDACXX or use DMATTN_CUDA=AUTO.")
  endif()
endif()
message(STATUS "dmattn: CUDA ${DMATTN_WITH_CUDA} ${DMATTN_CUDA_VERSION} ${DMATTN_CUDA_ARCH_LIST}")

function(dmattn_add_cuda target)
  include(instances)
  dmattn_sm80_instances(instance_sources instance_include)
  target_sources(${target} PRIVATE
    cpp/cuda/pack.cpp cpp/cuda/common/pack.cu
    cpp/cuda/select.cpp cpp/cuda/common/select.cu
    cpp/cuda/forward.cpp cpp/cuda/backward.cpp cpp/cuda/common/plan.cu cpp/cuda/common/rows.cu
    cpp/cuda/sm80/family.cu ${instance_sources})
  target_include_directories(${target} PRIVATE cpp/cuda ${instance_include})
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-gnu-unique --compress-mode=size -Xptxas=-warn-spills --expt-relaxed-constexpr>)
endfunction()

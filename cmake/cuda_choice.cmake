# Which CUDA targets DMATTN_CUDA stands for. Sets DMATTN_CUDA_ARCH_LIST, empty for a build without CUDA code, and DMATTN_CUDA_CHOICE,
# which says why in a line.
#
# pip hides what CMake prints. So make runs this file as a script before it builds: cmake -DDMATTN_CUDA=AUTO -P cmake/cuda_choice.cmake
cmake_minimum_required(VERSION 3.26)

# Binaries for 80 run on 86 and 89 as they are, those for 100 on 103, those for 120 on 121; other GPUs get the code of 80-virtual, which
# the driver compiles.
set(DMATTN_ALL_CUDA_ARCHS 80-real 90a-real 100-real 120-real 80-virtual)

# The targets of the GPUs that nvidia-smi lists, "90a-real" for a GPU of compute capability 9.0. GPUs below 8.0 have no kernels.
function(dmattn_visible_cuda_archs out)
  set(found "")
  find_program(DMATTN_NVIDIA_SMI nvidia-smi NO_CACHE)
  if(DMATTN_NVIDIA_SMI)
    execute_process(COMMAND ${DMATTN_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE listed RESULT_VARIABLE status ERROR_QUIET TIMEOUT 60)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[^\r\n]+" capabilities "${listed}")
      list(FILTER capabilities INCLUDE REGEX "^ *[0-9]+\\.[0-9] *$")  # warnings are among the lines
      list(TRANSFORM capabilities STRIP)
      list(FILTER capabilities EXCLUDE REGEX "^[0-7]\\.")
      list(TRANSFORM capabilities REPLACE "\\." "" OUTPUT_VARIABLE found)
      list(TRANSFORM found REPLACE "^90$" "90a")
      list(TRANSFORM found APPEND "-real")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

if(NOT DMATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "DMATTN_CUDA: expected AUTO, ON or OFF, got ${DMATTN_CUDA}")
endif()
set(DMATTN_CUDA_ARCH_LIST "")
if(DMATTN_CUDA STREQUAL "OFF")
  set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=OFF")
elseif(DMATTN_CUDA_ARCHS)
  set(DMATTN_CUDA_ARCH_LIST ${DMATTN_CUDA_ARCHS})
  set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=${DMATTN_CUDA}, chosen by DMATTN_CUDA_ARCHS")
elseif(DMATTN_CUDA STREQUAL "ON")
  set(DMATTN_CUDA_ARCH_LIST ${DMATTN_ALL_CUDA_ARCHS})
  set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=ON, all architectures")
else()
  dmattn_visible_cuda_archs(DMATTN_CUDA_ARCH_LIST)
  set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=AUTO, the GPUs of the machine that built")
  if(NOT DMATTN_CUDA_ARCH_LIST)
    set(DMATTN_CUDA_CHOICE "DMATTN_CUDA=AUTO saw no GPU that the kernels run on. For CUDA code of all architectures: \
make CUDA=ON, or pip install . -C cmake.define.DMATTN_CUDA=ON")
  endif()
endif()

if(CMAKE_SCRIPT_MODE_FILE)
  if(DMATTN_CUDA_ARCH_LIST)
    list(JOIN DMATTN_CUDA_ARCH_LIST ", " targets)
    message(STATUS "dmattn: with CUDA code for ${targets}, if CMake finds nvcc (${DMATTN_CUDA_CHOICE})")
  else()
    message(STATUS "dmattn: no CUDA code: ${DMATTN_CUDA_CHOICE}")
  endif()
endif()

# dmattn_cpu_kernels: cpp/cpu/kernels.cpp and reduce_kernels.cpp compiled once per instruction set; cpp/cpu/levels.h chooses among
# them at run time. A build with sanitizers has one set, that of the machine it is made on.
# To add an instruction set, add a row here and its name in cpp/cpu/levels.h. The first row is the baseline and has no flags.
add_library(dmattn_cpu_kernels INTERFACE)
set(DMATTN_CPU_LEVELS "baseline")
set(dmattn_flags_baseline "")
if(DMATTN_SANITIZE)
  set(dmattn_flags_baseline -march=native)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND DMATTN_CPU_LEVELS avx2 avx512)
  set(dmattn_flags_avx2 -mavx2 -mfma -mf16c)
  set(dmattn_flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
endif()
foreach(level IN LISTS DMATTN_CPU_LEVELS)
  add_library(dmattn_cpu_${level} OBJECT cpp/cpu/kernels.cpp cpp/cpu/reduce_kernels.cpp)
  target_compile_definitions(dmattn_cpu_${level} PRIVATE DMATTN_CPU_LEVEL=${level})
  target_compile_options(dmattn_cpu_${level} PRIVATE -O3 -ffp-contract=fast -fno-math-errno -fno-trapping-math -fno-exceptions
                         ${dmattn_flags_${level}})
  target_link_libraries(dmattn_cpu_${level} PRIVATE dmattn_warnings)
  target_link_libraries(dmattn_cpu_kernels INTERFACE $<TARGET_OBJECTS:dmattn_cpu_${level}>)
endforeach()
if("avx512" IN_LIST DMATTN_CPU_LEVELS)
  target_compile_definitions(dmattn_cpu_kernels INTERFACE DMATTN_CPU_X86)
endif()

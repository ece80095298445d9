# dmattn_torch: libtorch.so and the headers of the torch that Python finds, pinned to the stable ABI of 2.10.
# find_package(Torch) is avoided on purpose: it brings architecture flags, CUDA logic and libraries that would tie the binary to one torch.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "import importlib.metadata as m, importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0]); print(m.version('torch'))"
  OUTPUT_VARIABLE dmattn_torch_found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE dmattn_torch_missing)
if(dmattn_torch_missing)
  message(FATAL_ERROR "dmattn needs torch >= 2.10 in ${Python_EXECUTABLE} to build against; install it first (pip install torch).")
endif()
string(REPLACE "\n" ";" dmattn_torch_found "${dmattn_torch_found}")
list(GET dmattn_torch_found 0 dmattn_torch_dir)
list(GET dmattn_torch_found 1 DMATTN_TORCH_VERSION)
message(STATUS "dmattn: torch ${DMATTN_TORCH_VERSION}, stable ABI target 2.10")

add_library(dmattn_torch_lib SHARED IMPORTED)
set_target_properties(dmattn_torch_lib PROPERTIES IMPORTED_LOCATION ${dmattn_torch_dir}/lib/libtorch.so IMPORTED_NO_SONAME OFF)
add_library(dmattn_torch INTERFACE)
target_include_directories(dmattn_torch SYSTEM INTERFACE ${dmattn_torch_dir}/include)
target_compile_definitions(dmattn_torch INTERFACE TORCH_TARGET_VERSION=0x020a000000000000ULL)
# torch loads its libraries privately, so ours must name libtorch.so itself; --no-as-needed keeps the name although the symbols are in
# libraries that libtorch.so needs in turn.
target_link_options(dmattn_torch INTERFACE -Wl,--no-as-needed)
target_link_libraries(dmattn_torch INTERFACE dmattn_torch_lib)

# dmattn_plan: what the host decides before it launches anything on a GPU. Plain C++, so it is part of every build, and of dmattn._C.
include(instances)
dmattn_instance_rows(dmattn_rows_include)
add_library(dmattn_plan OBJECT
  cpp/cuda/host/instances.cpp cpp/cuda/host/key_source.cpp cpp/cuda/host/plan_backward.cpp cpp/cuda/host/plan_decode.cpp cpp/cuda/host/plan_forward.cpp cpp/cuda/host/plan_parts.cpp
  cpp/cuda/host/target.cpp cpp/cuda/host/tensor_maps.cpp cpp/cuda/host/workspace.cpp)
target_include_directories(dmattn_plan PRIVATE ${dmattn_rows_include})
target_link_libraries(dmattn_plan PRIVATE dmattn_warnings)

# The kernel instances of both families, as data.
#
# The sm80 family: dmattn_sm80_instances(out_sources out_include) writes one .cu per (kernel, size) into the build tree, and sm80_instances.h
# with the tables that cpp/cuda/sm80/dispatch.cu searches. A file of several instances parses the headers once for all of them.
#
# A row is kernel|size|smem_budget|traits; cpp/cuda/sm80/tiles.h explains the shared-memory budgets, cpp/cuda/traits.h the traits, which are
# keys:logits:bias. Traits that are left out are served by the general ones. What has no kLarge row has one that serves all GPUs: kAny. Decode has
# numbers of rows in place of traits, and so has step, the same kernel where it takes a new token into a bounded cache. Rows that take longest to
# compile are first.
set(dmattn_plain kInOrder:kScaled:kNone)
set(dmattn_gathered kGathered:kScaled:kKey)
set(dmattn_union kUnion:kScaled:kKey)
set(dmattn_general kAny:kAny:kPair)
set(dmattn_unmasked kAll:kScaled:kNone)
set(dmattn_listed kQueryLists:kScaled:kNone)
set(DMATTN_SM80_ROWS
  "backward_dq|64|kAny|${dmattn_plain},${dmattn_gathered},${dmattn_union},${dmattn_general}"
  "backward_dq|128|kLarge|${dmattn_plain},${dmattn_gathered},${dmattn_union},${dmattn_general}"
  "backward_dq|128|kSmall|${dmattn_general}"
  "backward_dq|256|kLarge|${dmattn_general}"
  "backward_dq|256|kSmall|${dmattn_general}"
  "forward|64|kAny|${dmattn_plain},${dmattn_gathered},${dmattn_union},${dmattn_general}"
  "forward|128|kAny|${dmattn_plain},${dmattn_gathered},${dmattn_union},${dmattn_general}"
  "backward_dkdv|64|kLarge|${dmattn_unmasked}"
  "backward_dkdv|64|kSmall|${dmattn_unmasked}"
  "backward_dkdv|64|kAny|${dmattn_listed},${dmattn_general}"
  "backward_dkdv|128|kLarge|${dmattn_unmasked},${dmattn_listed}"
  "backward_dkdv|128|kSmall|${dmattn_unmasked},${dmattn_listed}"
  "backward_dkdv|128|kAny|${dmattn_general}"
  "backward_dkdv|256|kLarge|${dmattn_general}"
  "backward_dkdv|256|kSmall|${dmattn_general}"
  "forward|256|kAny|${dmattn_general}"
  "decode|64|kAny|kFew,kMany"
  "decode|128|kAny|kFew,kMany"
  "decode|256|kAny|kFew,kMany"
  "step|64|kAny|kFew"
  "step|128|kAny|kFew"
  "step|256|kAny|kFew")

# The C++ type of traits: KernelTraits<Keys::kAll, Logits::kScaled, Bias::kNone> of kAll:kScaled:kNone.
function(dmattn_traits_type traits out)
  string(REPLACE ":" ";" traits ${traits})
  list(GET traits 0 keys)
  list(GET traits 1 logits)
  list(GET traits 2 bias)
  set(${out} "KernelTraits<Keys::${keys}, Logits::${logits}, Bias::${bias}>" PARENT_SCOPE)
endfunction()

# Fields of a row, as lists where commas separate several values: dmattn_split("forward|64,128" kernel dims).
macro(dmattn_split row)
  string(REPLACE "|" ";" dmattn_fields "${row}")
  foreach(dmattn_field ${ARGN})
    list(POP_FRONT dmattn_fields ${dmattn_field})
    string(REPLACE "," ";" ${dmattn_field} "${${dmattn_field}}")
  endforeach()
endmacro()

# Element types of instances, as name|C++ type.
set(dmattn_cuda_elements "kBFloat16|__nv_bfloat16" "kFloat16|__half")
string(REPLACE ";" "|" dmattn_wanted_types "${DMATTN_CUDA_TYPES}")
list(FILTER dmattn_cuda_elements INCLUDE REGEX "^(${dmattn_wanted_types})[|]")

function(dmattn_sm80_instances out_sources out_include)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/generated)
  set(header_forward forward.cuh)
  set(header_backward_dq backward_dq.cuh)
  set(header_backward_dkdv backward_dkdv.cuh)
  set(header_decode decode.cuh)
  set(header_step decode.cuh)
  set(call_forward ForwardCall)
  set(call_backward_dq BackwardCall)
  set(call_backward_dkdv BackwardCall)
  set(call_decode DecodeCall)
  set(call_step StepCall)
  set(count 0)
  foreach(row IN LISTS DMATTN_SM80_ROWS)
    dmattn_split(${row} kernel dim smem_budget all_traits)
    if(NOT dim IN_LIST DMATTN_CUDA_SIZES)
      continue()
    endif()
    list(APPEND files ${kernel}_${dim})
    set(header_of_${kernel}_${dim} ${header_${kernel}})
    foreach(element IN LISTS dmattn_cuda_elements)
      dmattn_split(${element} dtype type)
      foreach(traits IN LISTS all_traits)
        math(EXPR count "${count} + 1")
        set(launch launch_${kernel})
        if(kernel STREQUAL "decode" OR kernel STREQUAL "step")
          set(launch launch_decode)
          set(arguments "${type}, ${dim}, DecodeRows::${traits}, ${call_${kernel}}")
        else()
          dmattn_traits_type(${traits} traits)
          set(arguments "${type}, ${dim}, ${traits}")
          if(NOT kernel STREQUAL "forward")
            string(APPEND arguments ", SmemBudget::${smem_budget}")
          endif()
        endif()
        string(APPEND table_${kernel} " \\\n  ROW(${dtype}, ${type}, ${dim}, ${smem_budget}, ${traits})")
        set(declaration "template cudaError_t ${launch}<${arguments}>(const ${call_${kernel}}&, cudaStream_t);\n")
        string(APPEND text_${kernel}_${dim} "${declaration}")
        string(APPEND externs "extern ${declaration}")
      endforeach()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES files)
  foreach(file IN LISTS files)
    dmattn_write_instances(${folder}/sm80_${file}.cu sm80 ${header_of_${file}} "${text_${file}}")
    list(APPEND sources ${folder}/sm80_${file}.cu)
  endforeach()
  dmattn_write_tables(sm80 forward backward_dq backward_dkdv decode step)
  set(${out_sources} ${sources} PARENT_SCOPE)
  set(${out_include} ${folder} PARENT_SCOPE)
endfunction()

# Writes the header of a family: its tables table_${kernel} and the declarations of its instances, externs.
function(dmattn_write_tables family)
  string(TOUPPER ${family} upper)
  set(text "// Generated by cmake/instances.cmake: every instance of the ${family} family.\n#pragma once\n\n")
  foreach(kernel ${ARGN})
    string(TOUPPER ${kernel} name)
    string(APPEND text "#define DMATTN_${upper}_${name}(ROW)${table_${kernel}}\n\n")
  endforeach()
  string(APPEND text "namespace dmattn::cuda::${family} {\n${externs}}  // namespace dmattn::cuda::${family}\n")
  file(CONFIGURE OUTPUT ${folder}/${family}_instances.h CONTENT "${text}" @ONLY)
  message(STATUS "dmattn: ${count} kernel instances in the ${family} family")
endfunction()

# Writes one .cu with the instances that `text` declares.
function(dmattn_write_instances path family header text)
  set(namespace "dmattn::cuda::${family}")
  file(CONFIGURE OUTPUT ${path} CONTENT "// Generated by cmake/instances.cmake.
#include \"${family}/${header}\"

namespace ${namespace} {
${text}}  // namespace ${namespace}
" @ONLY)
endfunction()

# The same for the sm90 family: kernel|traits|sizes, one .cu per (kernel, size, traits). A size that is left out is served by a larger one, traits
# by the general ones; what has neither, by the sm80 family.
set(DMATTN_SM90_ROWS
  "forward|kAll:kScaled:kNone|64,128,256"
  "forward|kIntervals:kScaled:kKey|64,128"
  "forward|kInOrder:kScaled:kNone|64,128,256"
  "forward|kGathered:kScaled:kKey|64,128,256"
  "forward|kAny:kAny:kPair|64,128,256"
  "forward|kAll:kCapped:kNone|64,128,256"
  "forward|kAll:kDropout:kCopied|64,128"
  "forward|kGathered:kCapped:kKey|64,128,256"
  "forward|kUnion:kScaled:kKey|64,128,256"
  "forward|kUnion:kCapped:kKey|64,128,256"
  "forward|kRange:kScaled:kNone|64,128"
  "backward|kInOrder:kScaled:kNone|64,128"
  "backward|kIntervals:kScaled:kKey|64,128"
  "backward|kGathered:kScaled:kKey|64,128"
  "backward|kInOrder:kCapped:kKey|64,128"
  "backward|kGathered:kCapped:kKey|64,128"
  "backward|kUnion:kScaled:kKey|64,128"
  "backward|kUnion:kCapped:kKey|64,128"
  "backward|kQueryLists:kScaled:kKey|64,128"
  "backward|kQueryLists:kCapped:kKey|64,128"
  "backward|kInOrder:kDropout:kPair|64,128"
  "backward|kInOrder:kCapped:kPair|128"
  "backward_wide|kInOrder:kScaled:kNone|256"
  "backward_wide|kIntervals:kScaled:kKey|256"
  "backward_wide|kGathered:kScaled:kKey|256"
  "backward_wide|kInOrder:kCapped:kKey|256"
  "backward_wide|kGathered:kCapped:kKey|256"
  "backward_wide|kUnion:kScaled:kKey|256"
  "backward_wide|kUnion:kCapped:kKey|256"
  "backward_wide|kInOrder:kDropout:kPair|256"
  "backward_wide|kInOrder:kCapped:kPair|256")

function(dmattn_sm90_instances out_sources out_include)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/generated)
  set(parameters_forward "const ForwardCall&, const ForwardWork&, const ForwardMaps&, int, cudaStream_t")
  set(parameters_backward "const BackwardCall&, const BackwardWork&, const BackwardMaps&, int, cudaStream_t")
  set(parameters_backward_wide ${parameters_backward})
  set(header_forward forward/kernel.cuh)
  set(header_backward backward/kernel.cuh)
  set(header_backward_wide backward/kernel_wide.cuh)
  set(count 0)
  foreach(row IN LISTS DMATTN_SM90_ROWS)
    dmattn_split(${row} kernel traits dims)
    dmattn_traits_type(${traits} type_of_traits)
    string(REPLACE ":" "_" name_of_traits ${traits})
    foreach(dim IN LISTS dims)
      if(NOT dim IN_LIST DMATTN_CUDA_SIZES)
        continue()
      endif()
      set(declarations "")
      foreach(element IN LISTS dmattn_cuda_elements)
        dmattn_split(${element} dtype type)
        math(EXPR count "${count} + 1")
        string(APPEND table_${kernel} " \\\n  ROW(${dtype}, ${type}, ${dim}, ${type_of_traits})")
        set(declaration "template cudaError_t launch_${kernel}<${type}, ${dim}, ${type_of_traits}>(${parameters_${kernel}});\n")
        string(APPEND externs "extern ${declaration}")
        string(APPEND declarations "${declaration}")
      endforeach()
      set(source ${folder}/sm90_${kernel}_${dim}_${name_of_traits}.cu)
      dmattn_write_instances(${source} sm90 ${header_${kernel}} "${declarations}")
      list(APPEND sources ${source})
    endforeach()
  endforeach()
  dmattn_write_tables(sm90 forward backward backward_wide)
  set(${out_sources} ${sources} PARENT_SCOPE)
  set(${out_include} ${folder} PARENT_SCOPE)
endfunction()

# The rows above for the host alone, with and without CUDA: dmattn_instance_rows(out_include) writes instance_rows.h, from which
# cpp/cuda/host plans calls. backward_wide is the backward of its head size.
function(dmattn_instance_rows out_include)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/generated)
  foreach(row IN LISTS DMATTN_SM80_ROWS)
    dmattn_split(${row} kernel dim smem_budget all_traits)
    dmattn_append_rows(Sm80 ${kernel} "${dim}" ${smem_budget} "${all_traits}")
  endforeach()
  foreach(row IN LISTS DMATTN_SM90_ROWS)
    string(REPLACE "_wide" "" row ${row})
    dmattn_split(${row} kernel traits dims)
    dmattn_append_rows(Sm90 ${kernel} "${dims}" kAny ${traits})
  endforeach()
  set(text "// Generated by cmake/instances.cmake: every instance that the host may plan with.\n#pragma once\n\n")
  foreach(each Sm80_forward Sm80_backward_dq Sm80_backward_dkdv Sm80_decode Sm80_step Sm90_forward Sm90_backward)
    string(TOUPPER ${each} name)
    string(APPEND text "#define DMATTN_ROWS_${name}(ROW)${rows_${each}}\n\n")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/instance_rows.h CONTENT "${text}" @ONLY)
  set(${out_include} ${folder} PARENT_SCOPE)
endfunction()

# Appends rows of every size, type and traits to rows_${family}_${kernel}.
function(dmattn_append_rows family kernel dims smem_budget all_traits)
  set(name_forward Forward)
  set(name_backward_dq BackwardDq)
  set(name_backward_dkdv BackwardDkdv)
  set(name_backward Backward)
  set(name_decode Decode)
  set(name_step Step)
  set(rows rows_${family}_${kernel})
  foreach(dim IN LISTS dims)
    foreach(dtype IN LISTS DMATTN_CUDA_TYPES)
      foreach(traits IN LISTS all_traits)
        if(dim IN_LIST DMATTN_CUDA_SIZES)
          set(type ${traits})
          if(traits MATCHES ":")
            dmattn_traits_type(${traits} type)
          endif()
          string(APPEND ${rows} " \\\n  ROW(k${family}${name_${kernel}}, ${dtype}, ${dim}, ${smem_budget}, ${type})")
        endif()
      endforeach()
    endforeach()
  endforeach()
  set(${rows} "${${rows}}" PARENT_SCOPE)
endfunction()

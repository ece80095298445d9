# dmattn_warnings: host code compiles without a warning, and says nothing of the machine it was built on.
add_library(dmattn_warnings INTERFACE)
target_compile_options(dmattn_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-psabi -fno-gnu-unique -ffile-prefix-map=${CMAKE_SOURCE_DIR}=.>)
if(DMATTN_SANITIZE)
  target_compile_options(dmattn_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DMATTN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g>)
  target_link_options(dmattn_warnings INTERFACE -fsanitize=${DMATTN_SANITIZE})
endif()

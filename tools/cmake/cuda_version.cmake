# kvlab_want_cuda(<version> <what>): stops if CUDA is older than kvlab needs. cudaLibraryLoadData is new in 12.8.
function(kvlab_want_cuda version what)
  if(version VERSION_LESS 12.8)
    message(FATAL_ERROR "kvlab needs CUDA 12.8 or newer, for cudaLibraryLoadData, but ${what} has version ${version}. "
                        "Install a newer toolkit and name its compiler, as in "
                        "-DCMAKE_CUDA_COMPILER=/usr/local/cuda-12.8/bin/nvcc, or build without -DKVLAB_CUDA=ON.")
  endif()
endfunction()

# What the configuration says of a version of CUDA: -DVERSION=…
include(${SOURCE}/tools/cmake/cuda_version.cmake)
kvlab_want_cuda("${VERSION}" nvcc)
message(STATUS "CUDA ${VERSION} will do")

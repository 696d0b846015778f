# Prints how the configuration of a build judges the version -DVERSION=… of CUDA.
include(${SOURCE}/tools/cmake/cuda_version.cmake)
kvlab_want_cuda("${VERSION}" nvcc)
message(STATUS "CUDA ${VERSION} will do")

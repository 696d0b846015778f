/* Helpers of the C examples: errors, which end the program, and device memory. */
#ifndef KVLAB_EXAMPLES_DEVICE_H
#define KVLAB_EXAMPLES_DEVICE_H

#include <cuda_runtime_api.h>
#include <kvlab.h>
#include <stdio.h>
#include <stdlib.h>

static void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  exit(2);
}

static void done(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "%s\n", kvlab_last_error());
  exit(2);
}

/* Allocates device memory and copies `from` to it, or zeros it if `from` is NULL. */
static void* on_device(const void* from, size_t bytes) {
  void* to = NULL;
  if (bytes == 0) return NULL;
  check(cudaMalloc(&to, bytes), "cudaMalloc");
  check(from ? cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice) : cudaMemset(to, 0, bytes),
        "cudaMemcpy");
  return to;
}

static void to_host(void* to, const void* from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

#endif /* KVLAB_EXAMPLES_DEVICE_H */

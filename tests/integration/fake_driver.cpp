// libcuda.so.1 as it looks on a machine whose driver shows one GPU that LibTorch cannot use.
extern "C" {
int cuInit(unsigned) {
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return 0;
}
}

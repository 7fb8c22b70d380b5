// The kernels of kernel_plugin.h. nvcc makes libemend_cuda.so of this file, with a block of threads for each row; a C++
// compiler makes the stand-in of the tests, where a block is a loop: the arithmetic is the same text.
#include <emend/devices/plugins/kernel_plugin.h>

#include <cmath>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#define EMEND_BOTH __host__ __device__
#else
#define EMEND_BOTH
#endif

namespace emend::devices {
namespace {

// A bfloat16 number, rounded to the nearest (to even between two), as LibTorch rounds.
struct Narrow {
  uint16_t bits;
};

EMEND_BOTH inline float wide(float x) {
  return x;
}
EMEND_BOTH inline float wide(Narrow x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
EMEND_BOTH inline void put(float& to, float x) {
  to = x;
}
EMEND_BOTH inline void put(Narrow& to, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  to.bits = static_cast<uint16_t>(x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
template <class T>
EMEND_BOTH float rounded(float x) {
  T narrow;
  put(narrow, x);
  return wide(narrow);
}

template <class T>
EMEND_BOTH const T* in(const void* data, int64_t offset) {
  return static_cast<const T*>(data) + offset;
}
template <class T>
EMEND_BOTH T* out(void* data, int64_t offset) {
  return static_cast<T*>(data) + offset;
}

// Each work is a function of a row and of the block that does it, whose members take the entries first(), first() +
// step(), … each.

template <class T>
struct Normalise {
  AddRmsNorm a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const T *x = in<T>(a.x, row * a.width), *weight = in<T>(a.weight, 0);
    const T* added = a.added ? in<T>(a.added, row * a.width) : nullptr;
    T *sum = added ? out<T>(a.sum, row * a.width) : nullptr, *normed = out<T>(a.normed, row * a.width);
    float squares = 0;
    for (int64_t i = block.first(); i < a.width; i += block.step()) {
      float s = wide(x[i]);
      if (added) put(sum[i], s += wide(added[i])), s = wide(sum[i]);
      squares += s * s;
    }
    const float inverse = 1 / sqrtf(block.sum(squares) / static_cast<float>(a.width) + a.epsilon);
    if (block.first() == 0) a.inverse[row] = inverse;
    for (int64_t i = block.first(); i < a.width; i += block.step()) {
      const float s = wide(added ? sum[i] : x[i]) * inverse, w = wide(weight[i]);
      put(normed[i], a.one_plus ? s * (1 + w) : rounded<T>(s) * w);
    }
  }
};

template <class T>
struct NormaliseBack {
  AddRmsNormBack a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const int64_t begin = row * a.width;
    const T *sum = in<T>(a.sum, begin), *weight = in<T>(a.weight, 0), *grad = in<T>(a.grad_normed, begin);
    const T* more = a.grad_sum ? in<T>(a.grad_sum, begin) : nullptr;
    T* result = out<T>(a.grad, begin);
    const float inverse = a.inverse[row], one = a.one_plus ? 1 : 0;
    float along = 0;
    for (int64_t i = block.first(); i < a.width; i += block.step())
      along += wide(grad[i]) * (one + wide(weight[i])) * wide(sum[i]);
    const float pull = block.sum(along) * inverse * inverse * inverse / static_cast<float>(a.width);
    for (int64_t i = block.first(); i < a.width; i += block.step())
      put(result[i],
          wide(grad[i]) * (one + wide(weight[i])) * inverse - wide(sum[i]) * pull + (more ? wide(more[i]) : 0));
  }
};

template <class T>
struct Turn {
  RotateHeads a;
  EMEND_BOTH int64_t partner(int64_t i) const {
    if (a.interleaved) return i ^ 1;
    return i < a.turned / 2 ? i + a.turned / 2 : i - a.turned / 2;
  }
  template <class Block>
  EMEND_BOTH void operator()(int64_t token, Block& block) const {
    const T *cos = in<T>(a.cos, token * a.turned), *sin = in<T>(a.sin, token * a.turned);
    for (int32_t p = 0; p < a.n_parts; ++p) {
      const HeadPart& part = a.parts[p];
      const int64_t row = part.at_slots ? a.row[token] : token, slot = part.at_slots ? a.slot[token] : 0;
      for (int64_t at = block.first(); at < part.heads * a.size; at += block.step()) {
        const int64_t head = at / a.size, i = at % a.size;
        const T* x = in<T>(part.from, token * part.from_token + head * part.from_head);
        T& y = *out<T>(part.to, row * part.to_row + head * part.to_head + slot * part.to_slot + i);
        if (!part.rotated || i >= a.turned) {
          y = x[i];
        } else {
          const float other = wide(x[partner(i)]) * wide(sin[a.back ? partner(i) : i]);
          put(y, rounded<T>(wide(x[i]) * wide(cos[i])) + other);
        }
      }
    }
  }
};

template <class T>
struct Loss {
  HeadLoss a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const T* logits = in<T>(a.logits, row * a.vocab);
    float largest = -INFINITY, sum = 0;  // of this member, the sum relative to its largest
    for (int64_t i = block.first(); i < a.vocab; i += block.step()) {
      const float x = wide(logits[i]);
      if (!(x <= largest)) sum *= expf(largest - x), largest = x;  // so that NaN stays
      if (x != -INFINITY) sum += expf(x - largest);
    }
    const float most = block.max(largest);
    const float log_total = logf(block.sum(largest == -INFINITY ? 0 : sum * expf(largest - most)));
    const float chosen = wide(logits[a.labels[row]]) - most, nll = log_total - chosen;
    const float above = a.floor ? fmaxf(nll - a.floor[row], 0) : nll;
    if (block.first() == 0) {
      a.nll[row] = nll != nll ? nll : above;
      a.hit[row] = chosen >= 0;
    }
    if (!a.grad) return;
    T* grad = out<T>(a.grad, row * a.vocab);
    const float weight = a.floor && !(above > 0) ? 0 : a.weight[row];
    for (int64_t i = block.first(); i < a.vocab; i += block.step()) {
      const float p = expf(wide(logits[i]) - most - log_total);
      put(grad[i], weight * (p - (i == a.labels[row] ? 1.0F : 0.0F)));
    }
  }
};

struct Step {
  BallAdam a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const int64_t begin = row * a.width;
    const float rate = static_cast<float>(a.rate / (1 - a.power1[row]));
    const float root = static_cast<float>(sqrt(1 - a.power2[row])), epsilon = static_cast<float>(a.epsilon);
    const float keep1 = static_cast<float>(a.beta1), take1 = static_cast<float>(1 - a.beta1);
    const float keep2 = static_cast<float>(a.beta2), take2 = static_cast<float>(1 - a.beta2);
    float squares = 0;
    for (int64_t i = begin + block.first(); i < begin + a.width; i += block.step()) {
      const float g = a.grad[i];
      const float first = a.first[i] = a.first[i] * keep1 + g * take1;
      const float second = a.second[i] = a.second[i] * keep2 + g * g * take2;
      const float moved = a.moved[i] = a.value[i] - rate * first / (sqrtf(second) / root + epsilon);
      squares += moved * moved;
    }
    const float norm = sqrtf(block.sum(squares)), limit = a.limit[row];
    if (!(norm > limit)) return;
    for (int64_t i = begin + block.first(); i < begin + a.width; i += block.step())
      a.moved[i] = a.moved[i] * limit / norm;
  }
};

#ifdef __CUDACC__

struct Block {
  __device__ int64_t first() const { return threadIdx.x; }
  __device__ int64_t step() const { return blockDim.x; }
  __device__ float sum(float x) const { return reduced<false>(x); }
  __device__ float max(float x) const { return reduced<true>(x); }

 private:
  template <bool kMax>
  __device__ static float both(float a, float b) {
    return kMax ? fmaxf(a, b) : a + b;
  }
  template <bool kMax>
  __device__ static float warp(float x) {
    for (int other = 16; other > 0; other /= 2) x = both<kMax>(x, __shfl_xor_sync(0xFFFFFFFF, x, other));
    return x;
  }
  // Of all threads, to all threads; a block has whole warps.
  template <bool kMax>
  __device__ static float reduced(float x) {
    __shared__ float parts[32];
    const unsigned lane = threadIdx.x % 32;
    x = warp<kMax>(x);
    __syncthreads();  // nobody reads the last result any more
    if (lane == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp<kMax>(lane < blockDim.x / 32 ? parts[lane] : (kMax ? -INFINITY : 0.0F));
  }
};

template <class Work>
__global__ void run(Work work) {
  Block block;
  work(blockIdx.x, block);
}

thread_local cudaError_t g_error = cudaSuccess;

template <class Work>
int launch(const Work& work, int64_t rows, int64_t width, const KernelPlace& place) {
  const auto threads = static_cast<unsigned>(width >= 1024 ? 1024 : (width + 31) / 32 * 32);
  g_error = cudaSetDevice(place.device);
  if (g_error != cudaSuccess || rows == 0) return g_error != cudaSuccess;
  run<<<static_cast<unsigned>(rows), threads, 0, static_cast<cudaStream_t>(place.stream)>>>(work);
  g_error = cudaGetLastError();
  return g_error != cudaSuccess;
}

const char* last_error() {
  return g_error == cudaSuccess ? "" : cudaGetErrorString(g_error);
}
constexpr KernelMemory kMemory = KernelMemory::kCuda;

#else

struct Block {
  [[nodiscard]] int64_t first() const { return 0; }
  [[nodiscard]] int64_t step() const { return 1; }
  [[nodiscard]] float sum(float x) const { return x; }
  [[nodiscard]] float max(float x) const { return x; }
};

template <class Work>
int launch(const Work& work, int64_t rows, int64_t, const KernelPlace&) {
  Block block;
  for (int64_t row = 0; row < rows; ++row) work(row, block);
  return 0;
}

const char* last_error() {
  return "";
}
constexpr KernelMemory kMemory = KernelMemory::kHost;

#endif

template <template <class> class Work, class Arguments>
int launch_as(const Arguments& a, KernelDtype dtype, int64_t rows, int64_t width, const KernelPlace& place) {
  return dtype == KernelDtype::kFloat32 ? launch(Work<float>{a}, rows, width, place)
                                        : launch(Work<Narrow>{a}, rows, width, place);
}

int add_rms_norm(const AddRmsNorm& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<Normalise>(a, dtype, a.rows, a.width, place);
}
int add_rms_norm_back(const AddRmsNormBack& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<NormaliseBack>(a, dtype, a.rows, a.width, place);
}
int rotate_heads(const RotateHeads& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<Turn>(a, dtype, a.tokens, a.parts[0].heads * a.size, place);
}
int head_loss(const HeadLoss& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<Loss>(a, dtype, a.rows, a.vocab, place);
}
int ball_adam(const BallAdam& a, const KernelPlace& place) {
  return launch(Step{a}, a.rows, a.width, place);
}

}  // namespace
}  // namespace emend::devices

extern "C" __attribute__((visibility("default"))) const emend::devices::KernelPlugin* emend_kernel_plugin() {
  using namespace emend::devices;
  static const KernelPlugin plugin{kKernelPluginAbi, kMemory,   add_rms_norm, add_rms_norm_back,
                                   rotate_heads,     head_loss, ball_adam,    last_error};
  return &plugin;
}

// The kernels of kernel_plugin.h. nvcc makes libemend_cuda.so of this file, with a block of threads for each row; a C++
// compiler makes those of the host (devices/CMakeLists.txt), where a block is a loop: the arithmetic is the same text.
#include <emend/devices/plugins/kernel_plugin.h>

#include <cmath>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#define EMEND_BOTH __host__ __device__
#define EMEND_INDEPENDENT
#else
#define EMEND_BOTH
#define EMEND_INDEPENDENT _Pragma("GCC ivdep")  // results lie apart from what is read
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
// e^x. On the host in operations that a compiler makes vectors of, to 2 units in the last place; 0 below e^-87.
EMEND_BOTH inline float exponential(float x) {
#ifdef __CUDACC__
  return expf(x);
#else
  const float kept = x < -87.0F ? -87.0F : x > 88.0F ? 88.0F : x;  // or NaN, which stays in the polynomial
  const float powers = kept == kept ? kept * 1.44269504F : 0.0F, half = powers < 0 ? -0.5F : 0.5F;
  const auto whole = static_cast<int32_t>(powers + half);  // powers of 2
  const auto n = static_cast<float>(whole);
  const float r = kept - n * 0.693359375F + n * 2.12194440e-4F;
  float y = 1.9875691500e-4F * r + 1.3981999507e-3F;
  y = ((y * r + 8.3334519073e-3F) * r + 4.1665795894e-2F) * r + 1.6666665459e-1F;
  y = (y * r + 5.0000001201e-1F) * r * r + r + 1;
  const uint32_t bits = x < -87.0F ? 0 : static_cast<uint32_t>(whole + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return y * scale;
#endif
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
  // Entry i of a head, whose partner is p.
  EMEND_BOTH static void turn(const T* x, const T* cos, const T* sin, int64_t i, int64_t p, bool back, T* y) {
    const float other = wide(x[p]) * wide(sin[back ? p : i]);
    put(y[i], rounded<T>(wide(x[i]) * wide(cos[i])) + other);
  }
  template <class Block>
  EMEND_BOTH void operator()(int64_t token, Block& block) const {
    const T *cos = in<T>(a.cos, token * a.turned), *sin = in<T>(a.sin, token * a.turned);
    for (int32_t p = 0; p < a.n_parts; ++p) {
      const HeadPart& part = a.parts[p];
      const int64_t row = part.at_slots ? a.row[token] : token, slot = part.at_slots ? a.slot[token] : 0;
      const T* from = in<T>(part.from, token * part.from_token);
      T* to = out<T>(part.to, row * part.to_row + slot * part.to_slot);
      if constexpr (Block::kAlone) {
        for (int64_t head = 0; head < part.heads; ++head)
          turn_head(from + head * part.from_head, cos, sin, part.rotated ? a.turned : 0, to + head * part.to_head);
        continue;
      }
      for (int64_t at = block.first(); at < part.heads * a.size; at += block.step()) {
        const int64_t head = at / a.size, i = at % a.size;
        const T* x = from + head * part.from_head;
        T* y = to + head * part.to_head;
        if (!part.rotated || i >= a.turned)
          y[i] = x[i];
        else
          turn(x, cos, sin, i, partner(i), a.back, y);
      }
    }
  }

 private:
  EMEND_BOTH void turn_head(const T* x, const T* cos, const T* sin, int64_t turned, T* y) const {
    const int64_t half = turned / 2;
    if (a.interleaved) {
      for (int64_t i = 0; i < turned; ++i) turn(x, cos, sin, i, i ^ 1, a.back, y);
    } else {
      for (int64_t i = 0; i < half; ++i) turn(x, cos, sin, i, i + half, a.back, y);
      for (int64_t i = half; i < turned; ++i) turn(x, cos, sin, i, i - half, a.back, y);
    }
    for (int64_t i = turned; i < a.size; ++i) y[i] = x[i];
  }
};

// silu(gate)·up, where silu(x) = x·σ(x), and the gradients of both.
template <class T>
struct Gate {
  Gated a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const T *gate = in<T>(a.gate, row * a.gate_row), *up = in<T>(a.up, row * a.up_row);
    T* key = out<T>(a.key, row * a.width);
    for (int64_t i = block.first(); i < a.width; i += block.step()) {
      const float g = wide(gate[i]);
      put(key[i], rounded<T>(g / (1 + exponential(-g))) * wide(up[i]));
    }
  }
};

template <class T>
struct GateBack {
  GatedBack a;
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const T *gate = in<T>(a.gate, row * a.gate_row), *up = in<T>(a.up, row * a.up_row);
    const T* grad = in<T>(a.grad_key, row * a.width);
    T *to_gate = out<T>(a.grad_gate, row * a.width), *to_up = out<T>(a.grad_up, row * a.width);
    EMEND_INDEPENDENT
    for (int64_t i = block.first(); i < a.width; i += block.step()) {
      const float g = wide(gate[i]), open = 1 / (1 + exponential(-g)), whole = wide(grad[i]);
      put(to_up[i], whole * rounded<T>(g * open));
      put(to_gate[i], rounded<T>(whole * wide(up[i])) * open * (1 + g * (1 - open)));
    }
  }
};

template <class T>
struct Loss {
  HeadLoss a;
  EMEND_BOTH static float larger(float x, float y) { return y <= x ? x : y; }
  template <class Block>
  EMEND_BOTH void operator()(int64_t row, Block& block) const {
    const T* logits = in<T>(a.logits, row * a.vocab);
    constexpr int kAbreast = Block::kAlone ? 16 : 1;
    float largest[kAbreast], sum = 0;
    for (float& x : largest) x = -INFINITY;
    int64_t next = block.first();
    for (; next + kAbreast <= a.vocab; next += kAbreast * block.step())
      for (int j = 0; j < kAbreast; ++j) largest[j] = larger(largest[j], wide(logits[next + j]));
    for (; next < a.vocab; ++next) largest[0] = larger(largest[0], wide(logits[next]));
    for (const float x : largest) largest[0] = larger(largest[0], x);
    const float most = block.max(largest[0]);
    for (int64_t i = block.first(); i < a.vocab; i += block.step()) sum += exponential(wide(logits[i]) - most);
    const float log_total = logf(block.sum(sum));
    const float chosen = wide(logits[a.labels[row]]) - most, nll = log_total - chosen;
    const float above = a.floor ? fmaxf(nll - a.floor[row], 0) : nll;
    if (block.first() == 0) {
      a.nll[row] = nll != nll ? nll : above;
      a.hit[row] = nll == nll && chosen >= 0;  // a maximum may have lost what is no number, the sum has not
    }
    if (!a.grad) return;
    T* grad = out<T>(a.grad, row * a.vocab);
    const float weight = a.floor && !(above > 0) ? 0 : a.weight[row];
    for (int64_t i = block.first(); i < a.vocab; i += block.step()) {
      const float p = exponential(wide(logits[i]) - most - log_total);
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
  static constexpr bool kAlone = false;  // one thread does the whole row
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
  static constexpr bool kAlone = true;
  [[nodiscard]] static constexpr int64_t first() { return 0; }
  [[nodiscard]] static constexpr int64_t step() { return 1; }
  [[nodiscard]] float sum(float x) const { return x; }
  [[nodiscard]] float max(float x) const { return x; }
};

template <class Work>
int launch(const Work& work, int64_t, int64_t, const KernelPlace& place) {
  Block block;
  for (int64_t row = place.first_row; row < place.end_row; ++row) work(row, block);
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
int gated(const Gated& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<Gate>(a, dtype, a.rows, a.width, place);
}
int gated_back(const GatedBack& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<GateBack>(a, dtype, a.rows, a.width, place);
}
int head_loss(const HeadLoss& a, KernelDtype dtype, const KernelPlace& place) {
  return launch_as<Loss>(a, dtype, a.rows, a.vocab, place);
}
int ball_adam(const BallAdam& a, const KernelPlace& place) {
  return launch(Step{a}, a.rows, a.width, place);
}

}  // namespace
}  // namespace emend::devices

#ifndef EMEND_KERNEL_TABLE
#define EMEND_KERNEL_TABLE emend_kernel_plugin
#endif
extern "C" __attribute__((visibility("default"))) const emend::devices::KernelPlugin* EMEND_KERNEL_TABLE() {
  using namespace emend::devices;
  static const KernelPlugin plugin{kKernelPluginAbi, kMemory,   add_rms_norm, add_rms_norm_back, rotate_heads, gated,
                                   gated_back,       head_loss, ball_adam,    last_error};
  return &plugin;
}

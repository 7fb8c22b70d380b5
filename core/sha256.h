// SHA-256 through OpenSSL's libcrypto, for fingerprints and cache keys.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace emend {

/// Incremental hash. update() any number of times, then hex() once.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(const void* data, size_t size);  ///< more of the bytes to be hashed
  void update(std::string_view text) { update(text.data(), text.size()); }
  /// 64 lower-case hexadecimal digits. The object must not be used afterwards.
  [[nodiscard]] std::string hex();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

[[nodiscard]] std::string sha256_hex(std::string_view text);  ///< of one text

}  // namespace emend

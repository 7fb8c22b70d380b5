// SHA-256 through OpenSSL's libcrypto, for fingerprints and cache keys.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;  // of OpenSSL

namespace emend {

/// Incremental hash. update() any number of times, then hex() once.
class Sha256 {
 public:
  Sha256();

  void update(const void* data, size_t size);  ///< more of the bytes to be hashed
  void update(std::string_view text) { update(text.data(), text.size()); }
  /// 64 lower-case hexadecimal digits. The object must not be used afterwards.
  [[nodiscard]] std::string hex();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

[[nodiscard]] std::string sha256_hex(std::string_view text);  ///< of one text

}  // namespace emend

#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <openssl/evp.h>

namespace emend {

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  EMEND_CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1, "SHA-256 is not available");
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(const void* data, size_t size) {
  EMEND_CHECK(EVP_DigestUpdate(state_->context, data, size) == 1, "SHA-256 update failed");
}

std::string Sha256::hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EMEND_CHECK(EVP_DigestFinal_ex(state_->context, digest, &size) == 1, "SHA-256 final failed");
  return emend::hex({reinterpret_cast<const char*>(digest), size});
}

std::string sha256_hex(std::string_view text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex();
}

}  // namespace emend

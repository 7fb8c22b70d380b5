#include <emend/core/sha256.h>
#include <emend/core/text.h>
#include <openssl/evp.h>

namespace emend {

void Sha256::Free::operator()(evp_md_ctx_st* context) const noexcept {
  EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  EMEND_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1, "SHA-256 is not available");
}

void Sha256::update(const void* data, size_t size) {
  EMEND_CHECK(EVP_DigestUpdate(context_.get(), data, size) == 1, "SHA-256 update failed");
}

std::string Sha256::hex() {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EMEND_CHECK(EVP_DigestFinal_ex(context_.get(), digest, &size) == 1, "SHA-256 final failed");
  return emend::hex({reinterpret_cast<const char*>(digest), size});
}

std::string sha256_hex(std::string_view text) {
  Sha256 hash;
  hash.update(text);
  return hash.hex();
}

}  // namespace emend

#include <ATen/ATen.h>
#include <emend/models/detail/hash.h>

namespace emend::models::detail {

void hash_tensor(Sha256& hash, const std::string& name, const at::Tensor& tensor) {
  const at::Tensor bytes = tensor.contiguous();
  std::ostringstream header;
  header << name << '\n' << c10::toString(bytes.scalar_type()) << ' ' << bytes.sizes() << '\n';
  hash.update(header.str());
  hash.update(bytes.const_data_ptr(), bytes.nbytes());
}

}  // namespace emend::models::detail

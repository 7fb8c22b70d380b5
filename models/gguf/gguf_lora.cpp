#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/devices/route.h>
#include <emend/models/gguf/detail/gguf_architecture.h>
#include <emend/models/gguf/detail/gguf_container.h>
#include <emend/models/gguf/gguf_lora.h>
#include <emend/models/model.h>

#include <algorithm>

namespace emend::models {
namespace {

const ExpectedTensor& find_matrix(const std::vector<ExpectedTensor>& all, const Model& model,
                                  const std::string& weight) {
  const auto names = table_spellings(model.family(), weight);
  const auto found = std::ranges::find_if(
      all, [&](const ExpectedTensor& tensor) { return std::ranges::count(names, tensor.name) > 0; });
  if (found == all.end() || found->bias || found->layer < 0 || found->expert >= 0 || found->shape.size() != 2)
    throw Error(ErrorClass::kUnsupported, {weight, "a change of something that is not a matrix of a block",
                                           "linear layers of blocks", "write the whole model as GGUF instead"});
  return *found;
}

// Our rows in the order of the file's.
at::Tensor in_file_order(const at::Tensor& b_OR, const std::vector<int64_t>& order) {
  if (order.empty()) return b_OR;
  at::Tensor moved = at::empty_like(b_OR);
  moved.index_copy_(0, at::tensor(order, at::kLong), b_OR);
  return moved;
}

}  // namespace

std::vector<std::string> write_gguf_lora(const Model& model, const std::vector<LoraFactors>& factors,
                                         const std::filesystem::path& path) {
  const GgufForm& form = detail::gguf_architecture_for(model.config().model_type, path.string(), &model.family());
  const auto expected = expected_tensors(model.family(), model.config());
  GgufMetadata metadata;
  metadata.set_text("general.architecture", form.architecture);
  metadata.set_text("general.type", "adapter");
  metadata.set_text("general.name", "emend");
  metadata.set_text("adapter.type", "lora");
  metadata.set_number("adapter.lora.alpha", 0);  // llama.cpp: no scaling by alpha/rank
  std::vector<detail::GgufOutput> outputs;
  std::vector<std::string> adapted;
  const auto add = [&](const std::string& name, const at::Tensor& values) {
    outputs.push_back({name, GgmlType::kF32, values.sizes().vec(),
                       [values, name] { return detail::encode(values, GgmlType::kF32, name); }});
  };
  for (const auto& one : factors) {
    const ExpectedTensor& tensor = find_matrix(expected, model, one.weight);
    const bool turned = detail::is_transposed(model.family(), tensor);
    const int64_t out = tensor.shape[turned ? 1 : 0], in = tensor.shape[turned ? 0 : 1];
    if (one.a_RI.dim() != 2 || one.b_OR.dim() != 2 || one.a_RI.size(1) != in || one.b_OR.size(0) != out ||
        one.a_RI.size(0) != one.b_OR.size(1))
      refuse({one.weight, "factors of another shape",
              "[R, " + std::to_string(in) + "] and [" + std::to_string(out) + ", R]", ""});
    const at::Tensor a_RI = devices::to_host(one.a_RI).to(at::kFloat).contiguous();
    const at::Tensor b_OR = in_file_order(devices::to_host(one.b_OR).to(at::kFloat),
                                          detail::gguf_row_order(form, model.config(), tensor.part));
    const auto names = detail::gguf_names(form, model.config(), tensor);
    const auto pieces = detail::gguf_rows(model.config(), names.size(), out);
    int64_t row = 0;
    for (size_t i = 0; i < names.size(); ++i) {
      const int64_t rows = pieces[i];
      add(names[i] + ".weight.lora_a", a_RI);
      add(names[i] + ".weight.lora_b", b_OR.narrow(0, row, rows).contiguous());
      adapted.push_back(names[i] + ".weight");
      row += rows;
    }
  }
  (void)detail::write_container(path, metadata, 32, outputs);
  return adapted;
}

}  // namespace emend::models

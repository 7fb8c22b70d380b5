#include <ATen/ATen.h>
#include <emend/core/atomic_file.h>
#include <emend/core/json.h>
#include <emend/core/safetensors.h>
#include <emend/core/text.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace emend {
namespace {

using Json = nlohmann::json;

// In the format's words and, where they are not LibTorch's own, in Python's.
struct DtypeNames {
  std::string_view stored;
  at::ScalarType dtype;
  const char* python = nullptr;
};
constexpr std::array<DtypeNames, 10> kDtypes = {{{"F64", at::kDouble, "float64"},
                                                 {"F32", at::kFloat, "float32"},
                                                 {"F16", at::kHalf, "float16"},
                                                 {"BF16", at::kBFloat16, "bfloat16"},
                                                 {"I64", at::kLong},
                                                 {"I32", at::kInt},
                                                 {"I16", at::kShort},
                                                 {"I8", at::kChar},
                                                 {"U8", at::kByte},
                                                 {"BOOL", at::kBool}}};

constexpr uint64_t kMaxHeaderBytes = 100'000'000, kMaxBytes = uint64_t{1} << 62;

[[noreturn]] void corrupt(const std::filesystem::path& path, const std::string& got, const std::string& expected) {
  throw Error(ErrorClass::kCorruption,
              {path.string(), got, expected, "the file is truncated or damaged: fetch or write it again"});
}

// What torch.save writes, a zip file or in earlier versions a bare pickle, and other pickles claim an absurd header.
// They are never opened.
void refuse_pickle(const std::filesystem::path& path, const MappedFile& file) {
  const std::string_view begin = file.text().substr(0, 4);
  const bool bare = begin[0] == '\x80' && begin[1] >= 2 && begin[1] <= 5;  // its protocol
  if (begin != "PK\x03\x04" && !bare) return;
  throw Error(
      ErrorClass::kUnsupported,
      {path.string(), "a pickle, as torch.save writes too, which can run code when opened", "a safetensors file",
       "convert once in Python: safetensors.torch.save_file(torch.load(\"" + path.filename().string() +
           "\", weights_only=True), \"" + path.stem().string() + ".safetensors\")" +
           (bare ? "; what that refuses as well is opened by the program that wrote it alone" : "")});
}

Json parse_header(const std::filesystem::path& path, std::string_view text) {
  Json header = parse_json(text, path.string() + ": header",
                           {.max_depth = 4,
                            .max_bytes = kMaxHeaderBytes,
                            .expected = "a safetensors header with unique names",
                            .advice = "the file is truncated or damaged: fetch or write it again"});
  if (!header.is_object()) corrupt(path, "the header is not a JSON object", "a safetensors header");
  return header;
}

uint64_t unsigned_value(const std::filesystem::path& path, const std::string& name, const Json& value) {
  if (!value.is_number_unsigned())
    corrupt(path, "tensor \"" + name + "\": " + value.dump() + " where a size or offset should be",
            "a non-negative integer");
  return value.get<uint64_t>();
}

TensorInfo parse_tensor(const std::filesystem::path& path, const std::string& name, const Json& entry,
                        uint64_t data_begin, uint64_t data_bytes) {
  const auto dtype = entry.find("dtype"), shape = entry.find("shape"), offsets = entry.find("data_offsets");
  if (!entry.is_object() || dtype == entry.end() || shape == entry.end() || offsets == entry.end() ||
      !dtype->is_string() || !shape->is_array() || !offsets->is_array() || offsets->size() != 2)
    corrupt(path, "tensor \"" + name + "\" is declared as " + entry.dump().substr(0, 120),
            "dtype, shape and two data_offsets");
  TensorInfo info;
  info.name = name;
  const auto known = std::ranges::find(kDtypes, dtype->get_ref<const std::string&>(), &DtypeNames::stored);
  if (known == kDtypes.end())
    throw Error(ErrorClass::kUnsupported,
                {path.string(), "tensor \"" + name + "\" has dtype " + dtype->dump(),
                 "F64, F32, F16, BF16, U8 or a signed integer type", "convert the checkpoint to one of these"});
  info.dtype = known->dtype;
  if (shape->size() > 16)
    corrupt(path, "tensor \"" + name + "\" has " + std::to_string(shape->size()) + " dimensions", "at most 16");
  uint64_t bytes = c10::elementSize(info.dtype), spanned = bytes;  // strides overflow without elements too
  for (const auto& size : *shape) {
    const uint64_t n = unsigned_value(path, name, size), step = std::max<uint64_t>(n, 1);
    if (step > kMaxBytes / spanned)
      corrupt(path, "tensor \"" + name + "\" has shape " + shape->dump() + ", which overflows", "a size that fits");
    spanned *= step;
    bytes *= n;
    info.shape.push_back(static_cast<int64_t>(n));
  }
  const uint64_t begin = unsigned_value(path, name, (*offsets)[0]), end = unsigned_value(path, name, (*offsets)[1]);
  if (begin > end || end > data_bytes)
    corrupt(path,
            "tensor \"" + name + "\" occupies bytes " + offsets->dump() + " of a data section of " +
                std::to_string(data_bytes) + " bytes",
            "offsets inside the file");
  if (end - begin != bytes)
    corrupt(path, "tensor \"" + name + "\" has " + std::to_string(end - begin) + " bytes",
            std::to_string(bytes) + " for " + dtype->get<std::string>() + " " + shape->dump());
  info.offset = data_begin + begin;
  info.bytes = bytes;
  return info;
}

void refuse_overlap(const std::filesystem::path& path, const std::map<std::string, TensorInfo>& tensors) {
  std::vector<const TensorInfo*> order;
  for (const auto& [name, info] : tensors)
    if (info.bytes > 0) order.push_back(&info);
  std::ranges::sort(order, [](auto* a, auto* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < order.size(); ++i)
    if (order[i - 1]->offset + order[i - 1]->bytes > order[i]->offset)
      corrupt(path, "tensors \"" + order[i - 1]->name + "\" and \"" + order[i]->name + "\" overlap",
              "tensors that do not share bytes");
}

at::Tensor host_copy(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous();
}

std::string stored_name(at::ScalarType dtype) {
  const auto known = std::ranges::find(kDtypes, dtype, &DtypeNames::dtype);
  if (known != kDtypes.end()) return std::string(known->stored);
  refuse({"safetensors", std::string("dtype ") + c10::toString(dtype), "a floating-point or integer dtype",
          "convert the tensor first"});
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  const auto known = std::ranges::find(kDtypes, dtype, &DtypeNames::dtype);
  return known != kDtypes.end() && known->python ? known->python : c10::toString(dtype);
}

std::string shape_text(at::IntArrayRef shape) {
  return "[" + join(shape, ", ", [](int64_t n) { return std::to_string(n); }) + "]";
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(std::make_shared<MappedFile>(path)) {
  if (file_->size() < 8) corrupt(path, "the file has " + std::to_string(file_->size()) + " bytes", "at least 8");
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file_->data(), 8);  // little-endian, as is every platform LibTorch runs on
  if (header_bytes > kMaxHeaderBytes || header_bytes > file_->size() - 8) {
    refuse_pickle(path, *file_);
    corrupt(
        path,
        "the header claims " + std::to_string(header_bytes) + " bytes of a file of " + std::to_string(file_->size()),
        "a header inside the file, at most 100 MB");
  }
  const Json header = parse_header(path, file_->text().substr(8, header_bytes));
  const uint64_t data_begin = 8 + header_bytes, data_bytes = file_->size() - data_begin;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (!entry.is_object()) corrupt(path, "__metadata__ is not an object", "an object of strings");
      for (const auto& [key, value] : entry.items()) {
        if (!value.is_string()) corrupt(path, "metadata \"" + key + "\" is not a string", "an object of strings");
        metadata_[key] = value.get<std::string>();
      }
    } else {
      tensors_.emplace(name, parse_tensor(path, name, entry, data_begin, data_bytes));
    }
  }
  refuse_overlap(path, tensors_);
  uint64_t end = data_begin;
  for (const auto& [name, info] : tensors_) end = std::max<uint64_t>(end, info.offset + info.bytes);
  if (end != file_->size())
    corrupt(path, std::to_string(file_->size() - end) + " bytes behind the last tensor", "the end of the file");
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    throw Error(ErrorClass::kNotFound,
                {path_.string(), "no tensor \"" + name + "\"", "", did_you_mean(name, tensors_, "", key_of)});
  }
  const TensorInfo& info = it->second;
  const auto options = at::TensorOptions().dtype(info.dtype);
  if (info.bytes == 0) return at::empty(info.shape, options);
  void* data = file_->mutable_data() + info.offset;
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(info.dtype) != 0) {
    at::Tensor copy = at::empty(info.shape, options);  // an unaligned view would be undefined behaviour
    std::memcpy(copy.mutable_data_ptr(), data, info.bytes);
    return copy;
  }
  return at::from_blob(
      data, info.shape, [keep = file_](void*) {}, options);
}

void write_safetensors(const std::filesystem::path& path,
                       const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    if (header.contains(name)) refuse({path.string(), "tensor \"" + name + "\" given twice", "unique names", ""});
    const uint64_t bytes = tensor.numel() * tensor.element_size();
    header[name] = {{"dtype", stored_name(tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // keeps the data aligned
  const uint64_t size = text.size();
  AtomicFile file(path);
  file.write(&size, 8);
  file.write(text);
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = host_copy(tensor);
    file.write(host.const_data_ptr(), host.numel() * host.element_size());
  }
  file.commit();
}

void patch_safetensors(const std::filesystem::path& source, const std::filesystem::path& target,
                       const std::map<std::string, at::Tensor>& replacements) {
  const SafetensorsFile layout(source);  // validates before anything is written
  const MappedFile bytes(source);
  std::map<uint64_t, std::pair<const TensorInfo*, at::Tensor>> by_offset;
  for (const auto& [name, value] : replacements) {
    const at::Tensor old = layout.tensor(name);  // throws if absent
    if (old.scalar_type() != value.scalar_type() || old.sizes() != value.sizes())
      refuse({source.string(), "new value of \"" + name + "\" is " + value.toString() + " of another shape or dtype",
              stored_name(old.scalar_type()) + " of the stored shape", ""});
    const TensorInfo& info = layout.tensors().at(name);
    if (info.bytes > 0) by_offset[info.offset] = {&info, host_copy(value)};
  }
  AtomicFile file(target);
  uint64_t position = 0;
  for (const auto& [offset, entry] : by_offset) {
    file.write(bytes.data() + position, offset - position);
    file.write(entry.second.const_data_ptr(), entry.first->bytes);
    position = offset + entry.first->bytes;
  }
  file.write(bytes.data() + position, bytes.size() - position);
  file.commit();
}

}  // namespace emend

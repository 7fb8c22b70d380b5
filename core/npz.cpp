#include <ATen/ATen.h>
#include <emend/core/npz.h>
#include <emend/core/text.h>
#include <minizip/unzip.h>

#include <algorithm>
#include <memory>
#include <numeric>

namespace emend {
namespace {

constexpr std::string_view kEnding = ".npy";
constexpr std::string_view kMagic = "\x93NUMPY";

struct Close {
  void operator()(unzFile file) const { unzClose(file); }
};
using Archive = std::unique_ptr<std::remove_pointer_t<unzFile>, Close>;

[[noreturn]] void damaged(const std::filesystem::path& path, const std::string& got, const std::string& expected) {
  throw Error(ErrorClass::kCorruption, {path.string(), got, expected, "fetch the file again"});
}

Archive open_archive(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path))
    throw Error(ErrorClass::kNotFound, {path.string(), "no file", "an .npz file", "check the path"});
  Archive archive(unzOpen64(path.c_str()));
  if (!archive) damaged(path, "not a zip archive", "an .npz file as numpy.savez writes it");
  return archive;
}

// Bytes of the archive's current member, read in order.
class Member {
 public:
  Member(unzFile archive, const std::filesystem::path& path, const std::string& name)
      : archive_(archive), path_(path), name_(name) {
    if (unzOpenCurrentFile(archive) != UNZ_OK) fail("cannot be opened");
  }
  ~Member() {
    if (archive_) unzCloseCurrentFile(archive_);
  }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  void read(char* to, uint64_t bytes) {
    while (bytes > 0) {
      const auto step = static_cast<unsigned>(std::min<uint64_t>(bytes, 1U << 30));
      const int got = unzReadCurrentFile(archive_, to, step);
      if (got <= 0) fail("ends early");
      to += got;
      bytes -= static_cast<uint64_t>(got);
    }
  }
  /// All of it was read: the checksum is known.
  void finish() {
    char more;
    if (unzReadCurrentFile(archive_, &more, 1) != 0) fail("is longer than its header says");
    const int status = unzCloseCurrentFile(archive_);
    archive_ = nullptr;
    if (status != UNZ_OK) fail("has a checksum that does not fit its data");
  }
  [[noreturn]] void fail(const std::string& how) const {
    damaged(path_, "member \"" + name_ + "\" " + how, "an array");
  }

 private:
  unzFile archive_;
  const std::filesystem::path& path_;
  std::string name_;
};

struct Header {
  std::string type;  // "<f4"
  bool fortran = false;
  std::vector<int64_t> shape;
};

// "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 3), }"
Header parse_header(const std::string& text, const Member& member) {
  Header header;
  const auto after = [&](const std::string& key) {
    const size_t at = text.find("'" + key + "':");
    if (at == std::string::npos) member.fail("has a header without \"" + key + "\"");
    const size_t value = text.find_first_not_of(' ', at + key.size() + 3);
    if (value == std::string::npos) member.fail("has a header without a value of \"" + key + "\"");
    return value;
  };
  if (const size_t at = after("descr"); text[at] == '\'')
    header.type = text.substr(at + 1, text.find('\'', at + 1) - at - 1);
  header.fortran = text.compare(after("fortran_order"), 4, "True") == 0;
  size_t at = after("shape");
  const size_t end = text.find(')', at);
  if (text[at] != '(' || end == std::string::npos) member.fail("has a header without a shape");
  while ((at = text.find_first_of("0123456789", at)) < end) {
    size_t digits = 0;
    const std::string rest = text.substr(at, std::min<size_t>(end - at, 18));
    header.shape.push_back(std::stoll(rest, &digits));
    at += digits;
  }
  return header;
}

at::ScalarType dtype_of(const std::string& type, const std::filesystem::path& path, const std::string& name) {
  static const std::vector<std::pair<std::string, at::ScalarType>> types = {
      {"<f2", at::kHalf},  {"<f4", at::kFloat}, {"<f8", at::kDouble}, {"<i8", at::kLong}, {"<i4", at::kInt},
      {"<i2", at::kShort}, {"|i1", at::kChar},  {"|u1", at::kByte},   {"|b1", at::kBool}};
  for (const auto& [text, dtype] : types)
    if (type == text) return dtype;
  throw Error(ErrorClass::kUnsupported, {path.string(), "member \"" + name + "\" of type \"" + type + "\"",
                                         "little-endian numbers", "save the array as float32 or float64"});
}

}  // namespace

NpzFile::NpzFile(std::filesystem::path path) : path_(std::move(path)) {
  const Archive archive = open_archive(path_);
  for (int status = unzGoToFirstFile(archive.get()); status == UNZ_OK; status = unzGoToNextFile(archive.get())) {
    char name[512];
    if (unzGetCurrentFileInfo64(archive.get(), nullptr, name, sizeof name, nullptr, 0, nullptr, 0) != UNZ_OK)
      damaged(path_, "an unreadable directory", "an .npz file");
    std::string text(name, strnlen(name, sizeof name));
    if (text.ends_with(kEnding)) text.resize(text.size() - kEnding.size());
    names_.push_back(std::move(text));
  }
}

bool NpzFile::contains(const std::string& name) const {
  return std::ranges::find(names_, name) != names_.end();
}

at::Tensor NpzFile::read(const std::string& name) const {
  const Archive archive = open_archive(path_);
  if (unzLocateFile(archive.get(), (name + std::string(kEnding)).c_str(), 1) != UNZ_OK) {
    throw Error(ErrorClass::kNotFound, {path_.string(), "no array \"" + name + "\"", "one of: " + join(names_), ""});
  }
  Member member(archive.get(), path_, name);
  char magic[8];  // and the version
  member.read(magic, sizeof magic);
  if (std::string_view(magic, kMagic.size()) != kMagic) member.fail("is not an array of numpy's");
  unsigned char size[4] = {0, 0, 0, 0};
  member.read(reinterpret_cast<char*>(size), magic[6] >= 2 ? 4 : 2);
  const uint64_t length = size[0] + (uint64_t{size[1]} << 8) + (uint64_t{size[2]} << 16) + (uint64_t{size[3]} << 24);
  if (length > (1U << 20)) member.fail("has a header of " + std::to_string(length) + " bytes");
  std::string text(length, '\0');
  member.read(text.data(), length);
  const Header header = parse_header(text, member);
  const at::ScalarType dtype = dtype_of(header.type, path_, name);

  unz_file_info64 info;
  if (unzGetCurrentFileInfo64(archive.get(), &info, nullptr, 0, nullptr, 0, nullptr, 0) != UNZ_OK)
    member.fail("cannot be described");
  // The sizes are compared before anything is allocated.
  const uint64_t data =
      info.uncompressed_size - std::min<uint64_t>(info.uncompressed_size, text.size() + 8 + (magic[6] >= 2 ? 4 : 2));
  uint64_t expected = c10::elementSize(dtype), spanned = expected;  // strides overflow without elements too
  for (const int64_t n : header.shape) {
    const auto step = static_cast<uint64_t>(std::max<int64_t>(n, 1));
    if (step > (uint64_t{1} << 62) / spanned) member.fail("has a shape that overflows");
    spanned *= step;
    if (n > 0 && expected > data / static_cast<uint64_t>(n)) member.fail("is shorter than its shape says");
    expected *= static_cast<uint64_t>(n);
  }
  if (expected != data)
    member.fail("has " + std::to_string(data) + " bytes for a shape of " + std::to_string(expected));
  std::vector<int64_t> shape = header.shape;
  if (header.fortran) std::ranges::reverse(shape);
  at::Tensor tensor = at::empty(shape, at::TensorOptions().dtype(dtype));
  member.read(static_cast<char*>(tensor.mutable_data_ptr()), expected);
  member.finish();
  if (!header.fortran) return tensor;
  std::iota(shape.rbegin(), shape.rend(), 0);
  return tensor.permute(shape).contiguous();
}

}  // namespace emend

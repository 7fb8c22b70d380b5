// The two notations behind parse_hparams, and the tree that both build.
#pragma once

#include <emend/hparams/raw.h>

#include <string>
#include <string_view>
#include <vector>

namespace emend::hparams::detail {

constexpr size_t kMaxBytes = 256 * 1024;  ///< the largest published file has 3 KiB
constexpr int kMaxDepth = 64;

/// Grows one RawValue from a stream of events; checks depth, duplicate keys and the number of documents.
class TreeBuilder {
 public:
  explicit TreeBuilder(std::string source) : source_(std::move(source)) {}

  void begin(RawValue::Kind kind, int line);
  void end();
  void key(const std::string& name, int line);
  void leaf(RawValue value);
  /// True if the next event must be a map key.
  [[nodiscard]] bool wants_key() const;
  /// The finished tree. Throws Error(kInvalidArgument) if the text held nothing.
  [[nodiscard]] RawValue take();
  /// Throws Error(kInvalidArgument) "source:line: got; expected …; advice".
  [[noreturn]] void fail(int line, const std::string& got, const std::string& expected,
                         const std::string& advice) const;

 private:
  struct Open {
    RawValue value;
    bool key_pending = false;  ///< a key was read, its value not yet
    int key_line = 0;
  };
  void place(RawValue value);

  std::string source_;
  std::vector<Open> open_;
  RawValue root_;
  bool done_ = false;
};

[[nodiscard]] RawValue read_yaml(std::string_view text, const std::string& source);
[[nodiscard]] RawValue read_json(std::string_view text, const std::string& source);

}  // namespace emend::hparams::detail

#include <emend/models/tokenizer/detail/byte_level.h>
#include <emend/models/tokenizer/detail/checks.h>
#include <emend/models/tokenizer/detail/decoder.h>
#include <emend/models/tokenizer/detail/pattern.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <charconv>
#include <utility>

namespace emend::models::detail {
namespace {

class ByteLevelDecoder final : public DecodeStep {
 public:
  void apply(std::vector<std::string>& pieces) const override {
    std::string bytes;
    for (const std::string& piece : pieces) bytes += from_byte_level(piece);
    pieces = {repair_utf8(bytes)};
  }
  void apply_one(std::string& piece, bool) const override { piece = from_byte_level(piece); }
};

/// Runs of <0xNN> become text; if a run is not valid UTF-8, each of its bytes becomes U+FFFD.
class ByteFallbackDecoder final : public DecodeStep {
 public:
  void apply(std::vector<std::string>& pieces) const override {
    std::vector<std::string> result;
    std::string run;
    const auto end_run = [&] {
      if (find_invalid_utf8(run) == kNone) {
        if (!run.empty()) result.push_back(run);
      } else {
        result.insert(result.end(), run.size(), "\xEF\xBF\xBD");
      }
      run.clear();
    };
    for (std::string& piece : pieces) {
      const int byte = byte_of_piece(piece);
      if (byte >= 0) {
        run += static_cast<char>(byte);
      } else {
        end_run();
        result.push_back(std::move(piece));
      }
    }
    end_run();
    pieces = std::move(result);
  }
  void apply_one(std::string& piece, bool) const override {
    const int byte = byte_of_piece(piece);
    if (byte >= 0) piece.assign(1, static_cast<char>(byte));
  }
};

class FuseDecoder final : public DecodeStep {
 public:
  void apply(std::vector<std::string>& pieces) const override {
    std::string fused;
    for (const std::string& piece : pieces) fused += piece;
    pieces = {fused};
  }
  void apply_one(std::string&, bool) const override {}
};

class ReplaceDecoder final : public DecodeStep {
 public:
  ReplaceDecoder(Regex pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(std::vector<std::string>& pieces) const override {
    for (std::string& piece : pieces) apply_one(piece, false);
  }
  void apply_one(std::string& piece, bool) const override {
    std::string result;
    Regex::Scan scan(pattern_, piece);
    size_t begin = 0, end = 0, done = 0;
    while (scan.next(begin, end)) {
      result.append(piece, done, begin - done).append(content_);
      done = end;
    }
    result.append(piece, done);
    piece = std::move(result);
  }

 private:
  Regex pattern_;
  std::string content_;
};

/// Cuts up to `start` and `stop` times `content` off the ends of every piece. After a Fuse there is one piece only.
class StripDecoder final : public DecodeStep {
 public:
  StripDecoder(std::string content, int64_t start, int64_t stop, bool after_fuse)
      : content_(std::move(content)), start_(start), stop_(stop), after_fuse_(after_fuse) {}
  void apply(std::vector<std::string>& pieces) const override {
    for (std::string& piece : pieces) strip(piece, start_, stop_);
  }
  void apply_one(std::string& piece, bool at_start) const override {
    if (!after_fuse_) {
      strip(piece, start_, stop_);
    } else if (at_start) {
      strip(piece, start_, 0);
    }
  }

 private:
  void strip(std::string& piece, int64_t start, int64_t stop) const {
    const size_t size = content_.size();
    for (; start > 0 && piece.compare(0, size, content_) == 0; --start) piece.erase(0, size);
    for (; stop > 0 && piece.size() >= size && piece.compare(piece.size() - size, size, content_) == 0; --stop)
      piece.resize(piece.size() - size);
  }

  std::string content_;
  int64_t start_, stop_;
  bool after_fuse_;
};

/// ▁ becomes a space, and nothing in the first piece if the encoder put a prefix there.
class MetaspaceDecoder final : public DecodeStep {
 public:
  MetaspaceDecoder(std::string replacement, bool drops_first)
      : replacement_(std::move(replacement)), drops_first_(drops_first) {}
  void apply(std::vector<std::string>& pieces) const override {
    for (size_t i = 0; i < pieces.size(); ++i) apply_one(pieces[i], i == 0);
  }
  void apply_one(std::string& piece, bool at_start) const override {
    const std::string_view space = at_start && drops_first_ ? "" : " ";
    for (size_t at = 0; (at = piece.find(replacement_, at)) != std::string::npos; at += space.size())
      piece.replace(at, replacement_.size(), space);
  }

 private:
  std::string replacement_;
  bool drops_first_;
};

constexpr int kMaxDepth = 32;
constexpr int64_t kMaxStrip = 1000;

std::string one_character(const JsonView& view) {
  const std::string& text = view.string();
  if (text.empty() || utf8_length(text[0]) != text.size()) view.fail("one character");
  return text;
}

using Steps = std::vector<std::unique_ptr<DecodeStep>>;

void collect(const JsonView& view, Steps& steps, bool& fused, int depth) {
  const std::string& type = view.at("type").string();
  if (type == "Sequence") {
    if (depth > kMaxDepth) view.fail("sequences nested at most " + std::to_string(kMaxDepth) + " deep");
    for (const JsonView& step : view.at("decoders").elements()) collect(step, steps, fused, depth + 1);
  } else if (type == "ByteLevel") {
    steps.push_back(std::make_unique<ByteLevelDecoder>());
    fused = true;
  } else if (type == "ByteFallback") {
    steps.push_back(std::make_unique<ByteFallbackDecoder>());
  } else if (type == "Fuse") {
    steps.push_back(std::make_unique<FuseDecoder>());
    fused = true;
  } else if (type == "Replace") {
    auto pattern = make_pattern(view.at("pattern"));
    if (pattern) steps.push_back(std::make_unique<ReplaceDecoder>(std::move(*pattern), view.at("content").string()));
  } else if (type == "Strip") {
    steps.push_back(std::make_unique<StripDecoder>(one_character(view.at("content")),
                                                   view.at("start").integer(0, kMaxStrip),
                                                   view.at("stop").integer(0, kMaxStrip), fused));
  } else if (type == "Metaspace") {
    const bool never =
        view.string_or("prepend_scheme", "always") == "never" || !view.boolean_or("add_prefix_space", true);
    steps.push_back(std::make_unique<MetaspaceDecoder>(one_character(view.at("replacement")), !never));
  } else {
    view.unsupported("the decoder \"" + excerpt(type) + "\"",
                     "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace or Sequence");
  }
}

}  // namespace

int byte_of_piece(std::string_view piece) {
  if (piece.size() != 6 || piece.substr(0, 3) != "<0x" || piece[5] != '>') return -1;
  int byte = 0;
  const auto [end, error] = std::from_chars(piece.data() + 3, piece.data() + 5, byte, 16);
  return error == std::errc() && end == piece.data() + 5 && byte >= 0 ? byte : -1;
}

DecoderChain::DecoderChain(const JsonView& view) {
  bool fused = false;
  if (!view.is_null()) collect(view, steps_, fused, 0);
}

std::string DecoderChain::decode(std::vector<std::string> pieces) const {
  for (const auto& step : steps_) step->apply(pieces);
  std::string text;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (steps_.empty() && i > 0) text += ' ';
    text += pieces[i];
  }
  return text;
}

std::string DecoderChain::decode_one(std::string piece, bool at_start) const {
  for (const auto& step : steps_) step->apply_one(piece, at_start);
  if (steps_.empty() && !at_start) piece.insert(0, 1, ' ');
  return piece;
}

}  // namespace emend::models::detail

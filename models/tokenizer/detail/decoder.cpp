#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/bpe.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/unicode.h>

#include <algorithm>

namespace emend::models::detail {
namespace {

constexpr int64_t kMaxStrip = 1000;

DecodeStep byte_level_decoding() {
  return {[](std::string& piece, bool) { piece = from_byte_level(piece); },
          [](std::vector<std::string>& pieces) {
            std::string bytes;
            for (const std::string& piece : pieces) bytes += from_byte_level(piece);
            pieces = {repair_utf8(bytes)};
          }};
}

// Runs of <0xNN> become text; if a run is not valid UTF-8, each of its bytes becomes U+FFFD.
void decode_byte_runs(std::vector<std::string>& pieces) {
  std::vector<std::string> result;
  std::string run;
  const auto end_run = [&] {
    if (!first_invalid_utf8(run)) {
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

DecodeStep byte_fallback() {
  return {[](std::string& piece, bool) {
            const int byte = byte_of_piece(piece);
            if (byte >= 0) piece.assign(1, static_cast<char>(byte));
          },
          decode_byte_runs};
}

DecodeStep fuse() {
  return {{}, [](std::vector<std::string>& pieces) {
            std::string fused;
            for (const std::string& piece : pieces) fused += piece;
            pieces = {fused};
          }};
}

DecodeStep replace_matches(std::shared_ptr<const Regex> pattern, const std::string& content) {
  return {[pattern, content](std::string& piece, bool) {
            std::string result;
            const size_t most = longest_text(piece.size());
            Regex::Scan scan(*pattern, piece);
            size_t begin = 0, end = 0, done = 0;
            while (scan.next(begin, end)) {
              if (result.size() > most) refuse_growth("decoder", most);
              result.append(piece, done, begin - done).append(content);
              done = end;
            }
            result.append(piece, done);
            piece = std::move(result);
          },
          {}};
}

// Cuts up to `start` and `stop` times `content` off the ends of every piece. After a Fuse there is one piece only.
DecodeStep strip_ends(const std::string& content, int64_t start, int64_t stop, bool after_fuse) {
  const auto strip = [content](std::string& piece, int64_t start, int64_t stop) {
    const size_t size = content.size();
    for (; start > 0 && piece.compare(0, size, content) == 0; --start) piece.erase(0, size);
    for (; stop > 0 && piece.size() >= size && piece.compare(piece.size() - size, size, content) == 0; --stop)
      piece.resize(piece.size() - size);
  };
  return {[=](std::string& piece, bool at_start) {
            if (!after_fuse || at_start) strip(piece, start, after_fuse ? 0 : stop);
          },
          [=](std::vector<std::string>& pieces) {
            for (std::string& piece : pieces) strip(piece, start, stop);
          }};
}

// ▁ becomes a space, and nothing in the first piece if the encoder put a prefix there.
DecodeStep metaspace(const std::string& replacement, bool drops_first) {
  return {[=](std::string& piece, bool at_start) {
            piece = replace_all(std::move(piece), replacement, at_start && drops_first ? "" : " ");
          },
          {}};
}

}  // namespace

int byte_of_piece(std::string_view piece) {
  if (piece.size() != 6 || piece.substr(0, 3) != "<0x" || piece[5] != '>') return -1;
  return std::max(number_in<int>(piece.substr(3, 2), 16).value_or(-1), -1);
}

DecoderChain::DecoderChain(const JsonView& decoder) {
  bool fused = false;
  for_each_step(decoder, "decoders", [&](const JsonView& view, const std::string& type) {
    fused = fused || type == "ByteLevel" || type == "Fuse";
    if (type == "ByteLevel") {
      steps_.push_back(byte_level_decoding());
    } else if (type == "ByteFallback") {
      steps_.push_back(byte_fallback());
    } else if (type == "Fuse") {
      steps_.push_back(fuse());
    } else if (type == "Replace") {
      auto pattern = make_pattern(view.at("pattern"));
      if (pattern) steps_.push_back(replace_matches(std::move(pattern), view.at("content").string()));
    } else if (type == "Strip") {
      steps_.push_back(strip_ends(one_character(view.at("content")), view.at("start").integer(0, kMaxStrip),
                                  view.at("stop").integer(0, kMaxStrip), fused));
    } else if (type == "Metaspace") {
      const bool never =
          view.string_or("prepend_scheme", "always") == "never" || !view.boolean_or("add_prefix_space", true);
      steps_.push_back(metaspace(one_character(view.at("replacement")), !never));
    } else {
      view.unsupported("the decoder \"" + shorten(type) + "\"",
                       "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace or Sequence");
    }
  });
}

std::string DecoderChain::decode(std::vector<std::string> pieces) const {
  const auto bytes = [&pieces] {
    size_t sum = 0;
    for (const auto& piece : pieces) sum += piece.size();
    return sum;
  };
  const size_t most = longest_text(bytes());
  for (const DecodeStep& step : steps_) {
    if (step.all) {
      step.all(pieces);
    } else {
      for (size_t i = 0; i < pieces.size(); ++i) step.one(pieces[i], i == 0);
    }
    if (bytes() > most) refuse_growth("decoder", most);
  }
  std::string text;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (steps_.empty() && i > 0) text += ' ';
    text += pieces[i];
  }
  return text;
}

std::string DecoderChain::decode_one(std::string piece, bool at_start) const {
  const size_t most = longest_text(piece.size());
  for (const DecodeStep& step : steps_) {
    if (step.one) step.one(piece, at_start);
    if (piece.size() > most) refuse_growth("decoder", most);
  }
  if (steps_.empty() && !at_start) piece.insert(0, 1, ' ');
  return piece;
}

namespace {

using nlohmann::json;
void read_template(const JsonView& view, SpecialTokens& special) {
  const JsonView tokens = view.at("special_tokens");
  bool after = false;
  for (const JsonView& part : view.at("single").elements()) {
    if (part.has("Sequence")) {
      if (after || part.at("Sequence").string_or("id", "A") != "A") part.fail("the sequence A once");
      after = true;
      continue;
    }
    const std::string& name = part.at("SpecialToken").at("id").string();
    for (const JsonView& id : tokens.at(name).at("ids").elements())
      (after ? special.suffix_ids : special.prefix_ids).push_back(id.integer(0, kMaxTokenId));
  }
  if (!after) view.at("single").fail("a template with the sequence A");
}

}  // namespace

void read_post_processor(const JsonView& view, SpecialTokens& special, int depth) {
  if (view.is_null()) return;
  const std::string& type = view.at("type").string();
  if (type == "Sequence") {
    if (depth > kMaxSequenceDepth) view.fail("sequences nested at most " + std::to_string(kMaxSequenceDepth) + " deep");
    for (const JsonView& step : view.at("processors").elements()) {
      SpecialTokens around;
      read_post_processor(step, around, depth + 1);  // a later step goes around an earlier one
      special.prefix_ids.insert(special.prefix_ids.begin(), around.prefix_ids.begin(), around.prefix_ids.end());
      special.suffix_ids.insert(special.suffix_ids.end(), around.suffix_ids.begin(), around.suffix_ids.end());
    }
  } else if (type == "TemplateProcessing") {
    read_template(view, special);
  } else if (type == "RobertaProcessing" || type == "BertProcessing") {
    special.prefix_ids.push_back(view.at("cls").elements().at(1).integer(0, kMaxTokenId));
    special.suffix_ids.push_back(view.at("sep").elements().at(1).integer(0, kMaxTokenId));
  } else if (type != "ByteLevel") {
    view.unsupported("the post-processor \"" + shorten(type) + "\"", "TemplateProcessing, ByteLevel or Sequence");
  }
}

json template_processor(const std::vector<std::pair<std::string, int64_t>>& prefix,
                        const std::vector<std::pair<std::string, int64_t>>& suffix) {
  json single = json::array(), pair = json::array(), tokens = json::object();
  const auto token = [&tokens](const std::pair<std::string, int64_t>& entry, int type) {
    tokens[entry.first] = {{"id", entry.first}, {"ids", {entry.second}}, {"tokens", {entry.first}}};
    return json{{"SpecialToken", {{"id", entry.first}, {"type_id", type}}}};
  };
  const auto put = [&](json& list, int type) {
    for (const auto& entry : prefix) list.push_back(token(entry, type));
    list.push_back(json{{"Sequence", {{"id", type == 0 ? "A" : "B"}, {"type_id", type}}}});
    for (const auto& entry : suffix) list.push_back(token(entry, type));
  };
  put(single, 0);
  put(pair, 0);
  put(pair, 1);
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

}  // namespace emend::models::detail

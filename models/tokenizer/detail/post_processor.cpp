#include <emend/core/text.h>
#include <emend/models/tokenizer/detail/steps.h>
#include <emend/models/tokenizer/detail/vocabulary.h>

namespace emend::models::detail {
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

void read(const JsonView& view, SpecialTokens& special, int depth) {
  if (view.is_null()) return;
  const std::string& type = view.at("type").string();
  if (type == "Sequence") {
    if (depth > kMaxSequenceDepth) view.fail("sequences nested at most " + std::to_string(kMaxSequenceDepth) + " deep");
    for (const JsonView& step : view.at("processors").elements()) {
      SpecialTokens around;
      read(step, around, depth + 1);  // a later step goes around an earlier one
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

}  // namespace

void read_post_processor(const JsonView& view, SpecialTokens& special) {
  read(view, special, 0);
}

json template_processor(const std::vector<std::pair<std::string, int64_t>>& prefix,
                        const std::vector<std::pair<std::string, int64_t>>& suffix) {
  json single = json::array(), pair = json::array(), tokens = json::object();
  const auto token = [&tokens](const std::pair<std::string, int64_t>& entry, int type) {
    tokens[entry.first] = {{"id", entry.first}, {"ids", {entry.second}}, {"tokens", {entry.first}}};
    return json{{"SpecialToken", {{"id", entry.first}, {"type_id", type}}}};
  };
  const auto sequence = [](const char* name, int type) {
    return json{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  for (int type = 0; type < 2; ++type) {
    for (const auto& entry : prefix) {
      if (type == 0) single.push_back(token(entry, 0));
      pair.push_back(token(entry, type));
    }
    if (type == 0) single.push_back(sequence("A", 0));
    pair.push_back(sequence(type == 0 ? "A" : "B", type));
    for (const auto& entry : suffix) {
      if (type == 0) single.push_back(token(entry, 0));
      pair.push_back(token(entry, type));
    }
  }
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

}  // namespace emend::models::detail

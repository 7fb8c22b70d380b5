#include <emend/core/atomic_file.h>
#include <emend/core/error.h>
#include <emend/core/setting.h>
#include <emend/datasets/detail/rows.h>
#include <emend/datasets/instructions.h>

namespace emend::datasets {
namespace {

using detail::Fields;

// Instruction and input as one question, as the common training scripts join them.
std::string question(const std::string& instruction, const std::string& input) {
  return says_nothing(input) ? instruction : instruction + "\n" + input;
}

void add_history(Fields& fields, std::vector<Turn>& turns) {
  if (!fields.value().contains("history") || fields.value()["history"].is_null()) return;
  for (const auto& pair : fields.list("history")) {
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_string())
      fields.fail("history", shorten(pair.dump()), "pairs of strings, [question, answer]", "");
    turns.push_back({"user", pair[0].get<std::string>()});
    turns.push_back({"assistant", pair[1].get<std::string>()});
  }
}

std::vector<Turn> alpaca_turns(Fields& fields) {
  std::vector<Turn> turns;
  if (const auto system = fields.text_or("system"); !says_nothing(system)) turns.push_back({"system", system});
  add_history(fields, turns);
  turns.push_back({"user", question(fields.text("instruction"), fields.text_or("input"))});
  turns.push_back({"assistant", fields.text("output")});
  return turns;
}

std::string role_of(const std::string& name) {
  if (name == "human" || name == "user") return "user";
  if (name == "gpt" || name == "assistant") return "assistant";
  return name == "system" ? name : "";
}

std::vector<Turn> listed_turns(Fields& fields, const char* list, const char* role_key, const char* text_key) {
  std::vector<Turn> turns;
  for (const auto& message : fields.list(list)) {
    if (!message.is_object() || !message.contains(role_key) || !message.contains(text_key) ||
        !message[role_key].is_string() || !message[text_key].is_string())
      fields.fail(list, shorten(message.dump()),
                  std::string("an object with the strings \"") + role_key + "\" and \"" + text_key + "\"", "");
    const auto role = role_of(message[role_key].get<std::string>());
    if (role.empty())
      fields.fail(list, "the role " + message[role_key].dump(), "system, user (human) or assistant (gpt)", "");
    turns.push_back({role, message[text_key].get<std::string>()});
  }
  return turns;
}

// A conversation that a chat template can write and that has something to learn.
void check_turns(Fields& fields, const char* field, const std::vector<Turn>& turns) {
  for (size_t i = 0, expected = 0; i < turns.size(); ++i) {
    if (turns[i].role == "system" && i == 0) continue;
    const char* wanted = expected++ % 2 == 0 ? "user" : "assistant";
    if (turns[i].role != wanted)
      fields.fail(field, "turn " + std::to_string(i + 1) + " is the " + turns[i].role + "'s",
                  std::string("the ") + wanted + "'s", "users and assistants take turns");
  }
  if (turns.empty() || turns.back().role != "assistant" || says_nothing(turns.back().content))
    fields.fail(field, "no answer at the end", "an assistant's answer that is not empty", "");
}

}  // namespace

std::vector<Instruction> parse_instructions(std::string_view text, const std::string& name, int64_t limit) {
  if (limit < -1 || limit == 0) refuse({setting("limit"), std::to_string(limit), "1 or more, or -1 for all", ""});
  std::vector<Instruction> instructions;
  detail::RowReader rows(text, name);
  detail::Row row;
  while ((limit < 0 || std::ssize(instructions) < limit) && rows.next(row)) {
    Fields fields(row.value, rows.where(row));
    Instruction one;
    one.line = row.line;
    const char* field = "output";
    if (row.value.contains("messages")) {
      one.turns = listed_turns(fields, field = "messages", "role", "content");
    } else if (row.value.contains("conversations")) {
      one.turns = listed_turns(fields, field = "conversations", "from", "value");
    } else {
      one.turns = alpaca_turns(fields);
    }
    check_turns(fields, field, one.turns);
    instructions.push_back(std::move(one));
  }
  if (instructions.empty()) throw Error(ErrorClass::kCorruption, {name, "no rows", "at least one instruction", ""});
  return instructions;
}

std::vector<Instruction> load_instructions(const std::filesystem::path& path, int64_t limit) {
  return parse_instructions(MappedFile(path).text(), path.string(), limit);
}

}  // namespace emend::datasets

// The comparison of runs as Markdown.
#include <emend/core/text.h>
#include <emend/devices/units.h>
#include <emend/evaluation/detail/values.h>
#include <emend/evaluation/quality.h>

#include <algorithm>
#include <set>

namespace emend::evaluation {
namespace {

using detail::member;
using nlohmann::json;

constexpr const char* kNoFigure = "–";

// Text of others within a cell.
std::string cell_text(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '|') out += '\\';
    out += c == '\n' || c == '\r' ? ' ' : c;
  }
  return out;
}

std::string in_unit(double value, const std::string& unit) {
  if (unit == "B") return devices::format_bytes(static_cast<int64_t>(value));
  const int digits = unit.empty() ? 0 : unit == "%" ? 1 : unit == "nat" ? 4 : 2;
  return detail::fixed(value, digits);
}

// "98.0 (93–99)", with a star where the difference to the first run is more than chance.
std::string markdown_cell(const json& figure, const std::string& unit) {
  const auto value = detail::number(figure, "value");
  if (!value) return kNoFigure;
  std::string text = in_unit(*value, unit);
  if (member(figure, {"differs"}) == json(true)) text += "*";
  const json& range = figure.contains("range") ? figure["range"] : member(figure, {"ci95"});
  if (!range.is_array() || range.size() != 2 || unit == "B") return text;
  const int digits = unit == "%" ? (figure.contains("range") ? 1 : 0) : unit == "nat" ? 4 : 2;
  return text + " (" + detail::fixed(detail::as_number(range[0]), digits) + kNoFigure +
         detail::fixed(detail::as_number(range[1]), digits) + ")";
}

std::string markdown_line(const std::vector<std::string>& cells) {
  std::string text = "|";
  for (const auto& one : cells) text += " " + one + " |";
  return text + "\n";
}

std::string markdown_head(const std::vector<std::string>& cells) {
  std::string rule = "|---|";
  for (size_t i = 1; i < cells.size(); ++i) rule += "---:|";
  return markdown_line(cells) + rule + "\n";
}

// One row a run: the figures that `columns` name, of the row's `part`.
std::string markdown_table(const json& document, const json& columns, const char* part, bool collapse) {
  std::vector<std::string> heads = {""};
  for (const auto& column : columns) heads.push_back(column.at("head"));
  if (collapse) heads.emplace_back("collapses at");
  std::string text = markdown_head(heads);
  for (const auto& row : document.at("rows")) {
    const std::string state = row.at("state");
    const json& figures = member(row, {part});
    if (figures.empty() && collapse && row.at("kind") != "editor") continue;  // no sequence
    std::vector<std::string> cells = {cell_text(row.at("name"))};
    for (const auto& column : columns)
      cells.push_back(markdown_cell(member(figures, {column.at("key").get<std::string>()}), column.at("unit")));
    if (figures.empty() && cells.size() > 1) cells[1] = state;
    if (collapse) {
      const json& point = member(row, {"collapse"});
      const bool measured = point.is_object();
      cells.push_back(!measured                  ? kNoFigure
                      : point["edits"].is_null() ? "not by " + row["lifelong"].back().at("edits").dump()
                                                 : point["edits"].dump());
    }
    text += markdown_line(cells);
  }
  return text;
}

// One row a measurement, one column a run.
std::string on_the_way(const json& document, const json& column) {
  const std::string key = column.at("key");
  std::set<int64_t> edits;
  std::vector<const json*> runs;
  std::vector<std::string> heads = {"edits"};
  for (const auto& row : document.at("rows")) {
    if (row.at("lifelong").empty()) continue;
    runs.push_back(&row);
    heads.push_back(cell_text(row.at("name")));
    for (const auto& entry : row["lifelong"]) edits.insert(entry.at("edits").get<int64_t>());
  }
  std::string text =
      "\n" + column.at("head").get<std::string>() + ", measurement by measurement:\n\n" + markdown_head(heads);
  for (const auto count : edits) {
    std::vector<std::string> cells = {std::to_string(count)};
    for (const json* run : runs) {
      cells.emplace_back(kNoFigure);
      for (const auto& entry : run->at("lifelong"))
        if (entry.at("edits") == count) {
          if (const auto value = detail::as_number(detail::at_path(entry, key)))
            cells.back() = in_unit(*value, column.at("unit"));
        }
    }
    text += markdown_line(cells);
  }
  return text;
}

}  // namespace

std::string quality_table(const json& document) {
  std::string text;
  const json &columns = document.at("columns"), &sequence = document.at("lifelong_columns");
  if (!columns.empty() || sequence.empty()) text += markdown_table(document, columns, "figures", false);
  if (!sequence.empty()) {
    if (!text.empty()) text += "\nAt the last measurement:\n\n";
    text += markdown_table(document, sequence, "last", true);
    for (const auto& column : sequence)
      for (const char* shown : {"all", "free.paraphrase_begins", "health.lambada"})
        if (column.at("key") == shown) text += on_the_way(document, column);
  }
  const json& rows = document.at("rows");
  const auto any = [&](auto what) { return std::ranges::any_of(rows, what); };
  text += "\nIn brackets: 95 % intervals.";
  if (any([](const json& row) { return row.at("kind") == "mean"; }))
    text += " Of means over seeds: the lowest and the highest.";
  if (text.find("*") != std::string::npos)
    text += " *: the difference to " + cell_text(detail::text(document, "compared_with")) +
            ", fact by fact, is more than chance (95 %).";
  text += "\n";
  for (const auto& row : rows) {
    std::string note = row.at("note");
    if (const json& point = member(row, {"collapse"}); point.is_object() && !point["edits"].is_null())
      append_item(note, "collapses at " + point["edits"].dump() + " edits: " + detail::text(point, "why"), "; ");
    if (!note.empty())
      text += "- " + cell_text(row.at("name")) + (row.at("state") == "failed" ? ": failed: " : ": ") + cell_text(note) +
              "\n";
  }
  return text;
}

}  // namespace emend::evaluation

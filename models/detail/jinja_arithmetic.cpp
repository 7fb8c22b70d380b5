// Operators of a template, with Python's meaning.
#include <emend/models/detail/jinja_value.h>

#include <cmath>

namespace emend::models::detail::jinja {
namespace {

// Whole numbers; what does not fit into 64 bits is an error.
int64_t on_whole(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool wrong = false;
  if (op == "+") {
    wrong = __builtin_add_overflow(a, b, &result);
  } else if (op == "-") {
    wrong = __builtin_sub_overflow(a, b, &result);
  } else if (op == "*") {
    wrong = __builtin_mul_overflow(a, b, &result);
  } else if (op == "**") {
    result = 1;
    for (int64_t i = 0; i < b && !wrong && a != 1; ++i) {
      if (a == 0 || a == -1) {
        result = a == 0 ? 0 : b % 2 == 0 ? 1 : -1;
        break;
      }
      wrong = __builtin_mul_overflow(result, a, &result);
    }
  } else {  // rounded down, and the rest has the sign of b
    if (b == 0) throw Fault{"a division by zero"};
    if (b == -1) return op == "%" ? 0 : on_whole("-", 0, a);
    const int64_t rest = a % b, down = rest != 0 && (rest < 0) != (b < 0) ? 1 : 0;
    result = op == "%" ? rest + down * b : a / b - down;
  }
  if (wrong) throw Fault{"a number that does not fit into 64 bits"};
  return result;
}

double on_real(const std::string& op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") {
    if (a == 0 && b < 0) throw Fault{"a division by zero"};
    const double power = std::pow(a, b);
    if (std::isfinite(a) && std::isfinite(b) && !std::isfinite(power)) throw Fault{"a power that is no number"};
    return power;
  }
  if (b == 0) throw Fault{"a division by zero"};
  if (op == "/") return a / b;
  const double rest = std::fmod(a, b), positive = rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
  return op == "%" ? positive : std::round((a - positive) / b);
}

Value repeated(Work& work, const Value& value, int64_t count) {
  const auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  if (const auto* text = value.text()) {
    std::string all;
    for (size_t i = 0; i < times && !text->empty(); ++i) append(all, *text);
    return work.text(std::move(all));
  }
  const List& list = *value.list();
  std::vector<Value> all;
  for (size_t i = 0; i < times && !list.items.empty(); ++i) {
    work.step(list.items.size());
    all.insert(all.end(), list.items.begin(), list.items.end());
  }
  return work.list(std::move(all), list.tuple);
}

}  // namespace

Value arithmetic(Work& work, const std::string& op, const Value& a, const Value& b) {
  if (op == "~") return work.text(str(a) + str(b));
  for (const Value* side : {&a, &b})
    if (const List* list = side->list()) require_list(*list, "a sum or product");
  if (op == "+" && a.text() && b.text()) return work.text(*a.text() + *b.text());
  if (op == "+" && a.list() && b.list() && a.list()->tuple == b.list()->tuple) {
    work.step(a.list()->items.size());
    auto all = a.list()->items;
    all.insert(all.end(), b.list()->items.begin(), b.list()->items.end());
    return work.list(std::move(all), a.list()->tuple);
  }
  if (op == "*" && (a.text() || a.list()) && b.whole()) return repeated(work, a, *b.whole());
  if (op == "*" && (b.text() || b.list()) && a.whole()) return repeated(work, b, *a.whole());
  if (a.whole() && b.whole() && op != "/" && !(op == "**" && *b.whole() < 0))
    return {on_whole(op, *a.whole(), *b.whole())};
  if (a.real() && b.real()) return {on_real(op, *a.real(), *b.real())};
  throw Fault{type_name(a) + " " + op + " " + type_name(b)};
}

}  // namespace emend::models::detail::jinja

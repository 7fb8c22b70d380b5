#include <emend/core/error.h>
#include <emend/hparams/detail/readers.h>

#include <algorithm>

namespace emend::hparams::detail {

void TreeBuilder::fail(int line, const std::string& got, const std::string& expected, const std::string& advice) const {
  const bool from_option = source_.rfind("--set", 0) == 0;
  throw Error(ErrorClass::kInvalidArgument,
              {from_option ? source_ : source_ + ":" + std::to_string(line), got, expected, advice});
}

void TreeBuilder::begin(RawValue::Kind kind, int line) {
  if (open_.size() >= static_cast<size_t>(kMaxDepth))
    fail(line, "nesting of more than " + std::to_string(kMaxDepth) + " levels", "a flat list of hyper-parameters",
         "check the file");
  if (wants_key()) fail(line, "a list or map as a key", "a name", "");
  Open open;
  open.value.kind = kind;
  open.value.line = line;
  open_.push_back(std::move(open));
}

void TreeBuilder::end() {
  RawValue value = std::move(open_.back().value);
  open_.pop_back();
  place(std::move(value));
}

void TreeBuilder::key(const std::string& name, int line) {
  Open& map = open_.back();
  if (std::find(map.value.keys.begin(), map.value.keys.end(), name) != map.value.keys.end())
    fail(line, "\"" + name + "\" is given twice", "each key once", "remove one of them");
  map.value.keys.push_back(name);
  map.key_pending = true;
  map.key_line = line;
}

void TreeBuilder::leaf(RawValue value) {
  place(std::move(value));
}

bool TreeBuilder::wants_key() const {
  return !open_.empty() && open_.back().value.kind == RawValue::Kind::kMap && !open_.back().key_pending;
}

void TreeBuilder::place(RawValue value) {
  if (open_.empty()) {
    if (done_) fail(value.line, "a second document", "one", "remove everything from the second --- on");
    root_ = std::move(value);
    done_ = true;
    return;
  }
  Open& parent = open_.back();
  if (parent.value.kind == RawValue::Kind::kMap) {
    value.line = parent.key_line;  // messages point at the key
    parent.key_pending = false;
  }
  parent.value.items.push_back(std::move(value));
}

RawValue TreeBuilder::take() {
  if (!done_) fail(1, "no hyper-parameters", "YAML or JSON with one hyper-parameter a key", "");
  return std::move(root_);
}

}  // namespace emend::hparams::detail

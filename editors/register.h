// Editors of a program's own, beside those of methods.def.
//
// Goals: an editor in a program that uses the installed library is found by name like any other. Non-goal:
// self-registration; static libraries drop such objects without a word, so a program says it in its main().
#pragma once

#include <emend/editors/registry.h>

namespace emend::editors {

/// Adds an editor to the table. To be called before the table is used: references that all_editors() or find_editor()
/// gave earlier are no longer valid, and no other thread may use the table meanwhile. Throws Error(kInvalidArgument) if
/// the name is taken or empty, or the entry lacks `make`.
void register_editor(EditorInfo info);

}  // namespace emend::editors

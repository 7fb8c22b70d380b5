"""What every library is asked to do, and with which words."""
TASKS = {
    "capture": "a layer's output",
    "attention": "a layer's attention pattern",
    "patch": "a state of another prompt in this one",
    "ablate_head": "one attention head without its share",
    "knockout": "18 heads, each once without its share",
    "lens": "logit lens over all layers",
    "probe_states": "last states of 16 texts in all layers",
    "causal_trace": "subject blotted out, 30 states put back, one by one",
    "gradient": "gradient of a loss by a vector added inside",
    "edit": "a fact written by ROME, asked, taken back",
}
TEXT, OTHER, SUBJECT = "The Eiffel Tower is in the city of", "The Colosseum is in the city of", "The Eiffel Tower"
THINGS = ["tower", "river", "city", "house", "bridge", "garden", "road", "hill"]
TEXTS = [text for thing in THINGS for text in (f"Is the {thing} old?", f"The {thing} is old.")]
LAYERS, HEADS, WIDTH, SIZE = 30, 9, 576, 64  # SmolLM2-135M
PARIS, ROME = " Paris", " Rome"

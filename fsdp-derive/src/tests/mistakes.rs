//! Plants mistakes of known kinds in valid items.

use super::generate::{Dice, Field, Fields, Item, Kind, valid};

/// What may be wrong with a field: its attributes, as written, and its type. Each is one mistake or more.
const FIELDS: &[(&str, &str)] = &[
    // Unknown words, and known ones in the wrong place.
    ("#[fsdp(forzen)]", "Param"),
    ("#[fsdp(learning_rate = 0.1)]", "Param"),
    ("#[fsdp(learning_rate = 0.1, another)]", "Leaf"),
    ("#[fsdp(a::b)]", "Leaf"),
    ("#[fsdp(unit)]", "Leaf"),
    ("#[fsdp(unit, skip)]", "Leaf"),
    ("#[fsdp(crate = \"fsdp\")]", "Leaf"),
    ("#[fsdp(tp_size = 2)]", "Leaf"),
    ("#[fsdp(rename_all = \"camelCase\")]", "Leaf"),
    ("#[fsdp(bound = \"\")]", "Leaf"),
    // Twice said.
    ("#[fsdp(frozen, frozen)]", "Param"),
    ("#[fsdp(frozen)] #[fsdp(r#frozen = false)]", "Param"),
    ("#[fsdp(skip, skip)]", "Param"),
    ("#[fsdp(buffer)] #[fsdp(buffer)]", "Tensor"),
    ("#[fsdp(dtype = \"f32\", tp = row)] #[fsdp(dtype = \"f32\")]", "Param"),
    ("#[fsdp(init = zeros, init = zeros)]", "Param"),
    ("#[fsdp(shape = [1], shape = [1])]", "Param"),
    ("#[fsdp(fused(\"p\", \"q\"), fused(\"p\", \"q\"))]", "Param"),
    ("#[fsdp(rename = \"twice\", rename = \"said\")]", "Param"),
    // Wrong values.
    ("#[fsdp(skip = true)]", "Param"),
    ("#[fsdp(buffer(1))]", "Tensor"),
    ("#[fsdp(frozen = 1)]", "Param"),
    ("#[fsdp(no_decay = \"false\")]", "Param"),
    ("#[fsdp(expert(true))]", "Param"),
    ("#[fsdp(dtype = bf16)]", "Param"),
    ("#[fsdp(dtype = \"fp16\")]", "Param"),
    ("#[fsdp(dtype = )]", "Param"),
    ("#[fsdp(tp = colum)]", "Param"),
    ("#[fsdp(tp = \"row\")]", "Param"),
    ("#[fsdp(tp = dim)]", "Param"),
    ("#[fsdp(tp = dim(-1))]", "Param"),
    ("#[fsdp(init = kaiming)]", "Param"),
    ("#[fsdp(init = normal(0.0))]", "Param"),
    ("#[fsdp(init = zeros(1.0))]", "Param"),
    ("#[fsdp(init = 0.5)]", "Param"),
    ("#[fsdp(shape = 3)]", "Param"),
    ("#[fsdp(shape = (3, 4))]", "Param"),
    ("#[fsdp(shape = [3 4])]", "Param"),
    ("#[fsdp(rename)]", "Param"),
    ("#[fsdp(rename = \"\")]", "Param"),
    ("#[fsdp(rename = \"a b\")]", "Param"),
    ("#[fsdp(rename = \"a..b\")]", "Param"),
    ("#[fsdp(tie_with = weight)]", "Param"),
    ("#[fsdp(tie_with = \".weight\")]", "Param"),
    ("#[fsdp(fused)]", "Param"),
    ("#[fsdp(fused())]", "Param"),
    ("#[fsdp(fused(\"p\"))]", "Param"),
    ("#[fsdp(fused(p, q))]", "Leaf"),
    ("#[fsdp(fused = [\"p\", \"q\"])]", "Leaf"),
    ("#[fsdp(fused(\"p\", \"a..b\"))]", "Leaf"),
    ("#[fsdp(fused(\"p\", \"p\"))]", "Leaf"),
    // Contradictions.
    ("#[fsdp(skip, frozen)]", "Param"),
    ("#[fsdp(rename = \"x\")] #[fsdp(skip)]", "Leaf"),
    ("#[fsdp(skip, buffer)]", "Tensor"),
    ("#[fsdp(buffer, init = zeros)]", "Tensor"),
    ("#[fsdp(shape = [2], buffer)]", "Tensor"),
    ("#[fsdp(init = zeros, tie_with = \"x\")]", "Param"),
    ("#[fsdp(tp = row, shape = [8])]", "Param"),
    ("#[fsdp(shape = [1, 2], tp = dim(3))]", "Param"),
    ("#[fsdp(tp = column, shape = [])]", "Param"),
    ("#[fsdp(fused(\"p\", \"q\"), rename = \"x\")]", "Param"),
    ("#[fsdp(fused(\"p\", \"q\"), tie_with = \"x\")]", "Leaf"),
    ("#[fsdp(fused(\"p\", \"q\"), shape = [])]", "Param"),
    ("#[fsdp(fused(\"p\", \"q\"), skip)]", "Param"),
    ("#[fsdp(buffer, fused(\"p\", \"q\"))]", "Tensor"),
    ("#[fsdp(fused(\"p\", \"q\"))]", "usize"),
    ("#[fsdp(frozen)]", "f64"),
    ("#[fsdp(rename = \"eps\")]", "Option<usize>"),
    // Types that cannot be walked.
    ("", "Tensor"),
    ("", "Vec<Option<Tensor>>"),
    ("#[fsdp(frozen)]", "HashMap<String, Param>"),
    ("", "Option<std::collections::HashMap<u8, Leaf>>"),
    ("", "std::rc::Rc<Leaf>"),
    ("", "Arc<Mutex<Leaf>>"),
    ("", "RefCell<Param>"),
    ("", "Box<dyn Layer>"),
    ("", "Vec<Box<dyn Layer + Send>>"),
    // No attribute lists at all.
    ("#[fsdp]", "Param"),
    ("#[fsdp = \"skip\"]", "Param"),
    ("#[fsdp(\"skip\")]", "Param"),
    ("#[fsdp(frozen no_decay)]", "Param"),
    ("#[fsdp(,)]", "Param"),
];

/// What may be wrong with the struct's or the enum's own words.
const ITEMS: &[&str] = &[
    "unknown",
    "renam_all = \"camelCase\"",
    "frozen",
    "rename = \"x\"",
    "crate = \"not a path\"",
    "crate = 3",
    "bound = \"T FsdpUnit\"",
    "rename_all = \"camelcase\"",
    "rename_all = kebab",
    "tp_size = 0",
    "tp_size = \"8\"",
    "tp_size",
    "crate = \"a\", crate = \"b\"",
];

/// A valid item with one to three mistakes in it, and how many.
pub fn broken(seed: u64) -> (Item, usize) {
    let mut item = valid(seed, true);
    let mut dice = Dice::new(seed.rotate_left(32));
    let mistakes = 1 + dice.below(3);
    let mut on_item = false;
    for mistake in 0..mistakes {
        match dice.below(8) {
            0 if !on_item => {
                on_item = true;
                let at = dice.below(item.words.len() + 1);
                item.words.insert(at, ITEMS[dice.below(ITEMS.len())].to_string());
            }
            1 if item.is_enum && !item.alternatives.is_empty() => {
                let variant = Fields {
                    variant: format!("Wrong{mistake}"),
                    attrs: "#[fsdp(frozen)] ".to_string(),
                    kind: Kind::Unit,
                    list: Vec::new(),
                };
                item.alternatives.push(variant);
            }
            2 => {
                // The same name twice.
                let list = list_of(&mut item, &mut dice, mistake);
                for twin in ["one", "two"] {
                    let words = vec![format!("rename = \"same{mistake}\"")];
                    list.push(Field { words, ..field(&format!("{twin}{mistake}"), "", "Param") });
                }
            }
            3 if in_place(&mut item, &mut dice, mistake) => {}
            _ => {
                let (attrs, ty) = FIELDS[dice.below(FIELDS.len())];
                let list = list_of(&mut item, &mut dice, mistake);
                let at = dice.below(list.len() + 1);
                list.insert(at, field(&format!("wrong{mistake}"), attrs, ty));
            }
        }
    }
    (item, mistakes)
}

fn field(name: &str, malformed: &str, ty: &str) -> Field {
    Field {
        foreign: String::new(),
        words: Vec::new(),
        malformed: format!("{malformed} "),
        vis: String::new(),
        name: name.to_string(),
        ty: ty.to_string(),
        is_state: false,
    }
}

/// A list of fields that can take one more.
fn list_of<'i>(item: &'i mut Item, dice: &mut Dice, mistake: usize) -> &'i mut Vec<Field> {
    if item.is_enum && (item.alternatives.is_empty() || dice.percent(30)) {
        let kind = if dice.percent(50) { Kind::Named } else { Kind::Tuple };
        let variant = format!("More{mistake}");
        item.alternatives.push(Fields { variant, attrs: String::new(), kind, list: Vec::new() });
    }
    let at = dice.below(item.alternatives.len());
    let fields = &mut item.alternatives[at];
    if fields.kind == Kind::Unit {
        fields.kind = Kind::Named;
    }
    &mut fields.list
}

/// Adds a wrong word among those of a field that has none yet.
fn in_place(item: &mut Item, dice: &mut Dice, mistake: usize) -> bool {
    let fields = item.alternatives.iter_mut().flat_map(|fields| &mut fields.list);
    let mut whole: Vec<&mut Field> = fields.filter(|field| field.malformed.is_empty()).collect();
    if whole.is_empty() {
        return false;
    }
    let at = dice.below(whole.len());
    let words = &mut whole[at].words;
    let word = ["forzen", "group = 3", "x(1, 2)", "a::b = \"c\""][dice.below(4)];
    words.insert(dice.below(words.len() + 1), word.replace("forzen", &format!("forzen{mistake}")));
    true
}

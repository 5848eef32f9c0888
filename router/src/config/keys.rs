//! Keys of the router's operators: `id:name:role:key`, as SGLang's router and smg spell them.

use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "snake_case")]
pub enum KeyRole {
    /// May use the control paths.
    Admin,
    /// Is known, and may not.
    User,
}

#[derive(Clone, PartialEq, Eq)]
pub struct ControlKey {
    pub id: String,
    pub name: String,
    pub role: KeyRole,
    pub key: String,
}

/// Without the secret.
impl fmt::Debug for ControlKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{:?}:…", self.id, self.name, self.role)
    }
}

impl FromStr for ControlKey {
    type Err = String;

    /// The message repeats nothing that may be the secret.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.splitn(4, ':').collect();
        let [id, name, role, key] = parts[..] else {
            return Err(format!("{} of 4 parts; give ID:NAME:ROLE:KEY", parts.len()));
        };
        let unknown = |_| format!("key {id}: the third part is the role; give admin or user");
        let role = role.parse().map_err(unknown)?;
        if id.is_empty() || key.is_empty() {
            return Err("ID and KEY may not be empty; give ID:NAME:ROLE:KEY".to_owned());
        }
        Ok(Self {
            id: id.to_owned(),
            name: name.to_owned(),
            role,
            key: key.to_owned(),
        })
    }
}

/// Problems between several keys.
pub fn validate(keys: &[ControlKey]) -> Vec<String> {
    let mut bad = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let others = &keys[..at];
        if others.iter().any(|other| other.id == key.id) {
            bad.push(format!("id {} is given twice", key.id));
        } else if let Some(other) = others.iter().find(|other| other.key == key.key) {
            bad.push(format!("{} and {} have the same key", other.id, key.id));
        }
    }
    let complaint = |what| format!("--control-plane-api-keys: {what}; give each its own");
    bad.into_iter().map(complaint).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn four_parts_the_last_may_hold_colons() {
        let key: ControlKey = "ci:CI Pipeline:admin:se:cret".parse().unwrap();
        assert_eq!((key.id.as_str(), key.name.as_str()), ("ci", "CI Pipeline"));
        assert_eq!((key.role, key.key.as_str()), (KeyRole::Admin, "se:cret"));
        assert!(!format!("{key:?}").contains("cret"));
    }

    #[test]
    fn mistakes_are_named_without_the_secret() {
        for (text, part) in [
            ("secret", "1 of 4 parts"),
            ("a:b:boss:secret", "key a: the third part is the role"),
            ("a:b:user:", "may not be empty"),
            (":b:user:secret", "may not be empty"),
        ] {
            let why = text.parse::<ControlKey>().unwrap_err();
            assert!(why.contains(part) && !why.contains("secret"), "{why}");
        }
        let key = |text: &str| text.parse::<ControlKey>().unwrap();
        assert!(validate(&[key("a::user:1"), key("b::admin:2")]).is_empty());
        assert!(
            validate(&[key("a::user:1"), key("a::admin:2")])[0].contains("id a is given twice")
        );
        assert!(validate(&[key("a::user:1"), key("b::admin:1")])[0].contains("a and b have"));
    }
}

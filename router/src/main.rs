fn main() {
    std::process::exit(baton_router::run(std::env::args().collect()));
}

"""Words, trees and checks that all packages share; nothing here compiles or counts."""
